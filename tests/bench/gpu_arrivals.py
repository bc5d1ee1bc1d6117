"""Kernels whose groups meet at barriers in shared memory, in a form that compute-sanitizer's race checker follows.

Triton lets the threads of a group meet (`bar.sync`) and one of them arrive for all. That orders all that the group did, as releases are
cumulative, but the checker counts the arriving thread's accesses only: it reports hazards even of a producer and a consumer of ten lines, which
`python -m tests.bench.gpu_arrivals` runs in both forms. Here every thread of the group arrives for itself and barriers count them all. Who waits
for whom, and where, stays; so do all accesses.
"""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.device.cuda import load_driver

ARRIVE = re.compile(r"@%p\d+ (mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\]);")
INIT = re.compile(r"(mbarrier\.init\.shared::cta\.b64 \[%r\d+\], )(\d+);")
MEETING = re.compile(r"bar\.sync\s+\d+, (\d+);")


def meets_at_barriers(ptx: str) -> bool:
    """Whether a kernel has barriers that one thread arrives at for others."""
    return ARRIVE.search(ptx) is not None


def own_arrivals(ptx: str) -> str:
    """The PTX with an arrival of every thread. Raises ValueError where an arrival does not follow a meeting of its group, groups differ, or some
    arrive in another way, as copies do."""
    sizes = set()
    others = ptx.count("mbarrier.arrive") - len(ARRIVE.findall(ptx))
    if others:
        raise ValueError(f"{others} arrivals of another kind")
    for arrival in ARRIVE.finditer(ptx):
        meetings = list(MEETING.finditer(ptx, 0, arrival.start()))
        if not meetings or ptx.count("\n", meetings[-1].end(), arrival.start()) > 4:
            raise ValueError(f"an arrival without a meeting in front of it: {arrival[0]}")
        sizes.add(int(meetings[-1][1]))
    if len(sizes) != 1:
        raise ValueError(f"groups of {sorted(sizes)} threads arrive; expected one size")
    (size,) = sizes
    return INIT.sub(lambda m: f"{m[1]}{int(m[2]) * size};", ARRIVE.sub(r"\1;", ptx))


def assemble(artifact: Artifact, folder: Path, assembler: Path) -> list[str]:
    """Writes `SYMBOL.cubin` into the folder for every kernel of the artifact that meets at barriers; returns their symbols. One whose arrivals have
    another form is named, left out, and so checked as it is built."""
    folder.mkdir(parents=True, exist_ok=True)
    made, chip = [], artifact.manifest.gpu.chip if artifact.manifest.gpu else ""
    for kernel in artifact.manifest.kernels:
        source = artifact.directory / "source" / artifact.target / f"{kernel.symbol}.ptx"
        if not source.exists() or not meets_at_barriers(text := source.read_text()):
            continue
        path = folder / f"{kernel.symbol}.ptx"
        try:
            path.write_text(own_arrivals(text))
        except ValueError as error:
            print(f"{kernel.symbol}: {error}; it will be checked as it is built")
            continue
        subprocess.run([assembler, f"--gpu-name={chip}", path, "-o", path.with_suffix(".cubin")], check=True)
        path.unlink()
        made.append(kernel.symbol)
    return made


# -- a producer and a consumer

ELECTED, OWN = "toy_elected", "toy_own"
GROUP, TURNS = 128, 8
TOY = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry {ELECTED}(.param .u64 out)
{{
  .reg .b32 %r<12>;
  .reg .b64 %rd<3>;
  .reg .pred %p<8>;
  .shared .align 16 .b8 box[{4 * GROUP}];
  .shared .align 8 .b64 full;
  .shared .align 8 .b64 free;
  mov.u32 %r0, %tid.x;
  and.b32 %r1, %r0, {GROUP - 1};
  mov.u32 %r2, full;
  mov.u32 %r3, free;
  mov.u32 %r4, box;
  setp.eq.u32 %p0, %r0, 0;
  @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
  @%p0 mbarrier.init.shared::cta.b64 [%r3], 1;
  bar.sync 0, {2 * GROUP};
  setp.eq.u32 %p1, %r1, 0;
  mov.u32 %r5, 0;
  mov.u32 %r6, 0;
  setp.ge.u32 %p2, %r0, {GROUP};
  @%p2 bra consumer;
  mad.lo.u32 %r7, %r1, 4, %r4;
producer:
  and.b32 %r8, %r5, 1;
  xor.b32 %r8, %r8, 1;
taken:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], %r8;
  @!%p3 bra taken;
  mad.lo.u32 %r9, %r5, 1000, %r1;
  st.shared.u32 [%r7], %r9;
  bar.sync 1, {GROUP};
  @%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
  add.u32 %r5, %r5, 1;
  setp.lt.u32 %p4, %r5, {TURNS};
  @%p4 bra producer;
  ret;
consumer:
  sub.u32 %r7, {GROUP - 1}, %r1;
  mad.lo.u32 %r7, %r7, 4, %r4;
turn:
  and.b32 %r8, %r5, 1;
filled:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], %r8;
  @!%p3 bra filled;
  ld.shared.u32 %r9, [%r7];
  add.u32 %r6, %r6, %r9;
  bar.sync 2, {GROUP};
  @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
  add.u32 %r5, %r5, 1;
  setp.lt.u32 %p4, %r5, {TURNS};
  @%p4 bra turn;
  ld.param.u64 %rd0, [out];
  mul.wide.u32 %rd1, %r1, 4;
  add.u64 %rd0, %rd0, %rd1;
  st.global.u32 [%rd0], %r6;
  ret;
}}
"""
"""One group writes a number a thread, the other adds up its neighbours', in turns; `full` and `free` order them."""


def toys() -> dict[str, str]:
    """Both forms by name."""
    return {ELECTED: TOY, OWN: own_arrivals(TOY).replace(ELECTED, OWN)}


def main() -> int:
    """Runs both forms; 0 where both are right, 1 where one is not."""
    driver = load_driver()
    context = driver("cuDevicePrimaryCtxRetain", driver("cuDeviceGet", 0))
    driver("cuCtxSetCurrent", context)
    out, wanted = driver("cuMemAlloc", 4 * GROUP), [sum(1000 * i + GROUP - 1 - t for i in range(TURNS)) for t in range(GROUP)]
    right = True
    for name, text in toys().items():
        function = driver("cuModuleGetFunction", driver("cuModuleLoadData", text.encode() + b"\0"), name.encode())
        driver("cuLaunchKernel", function, 1, 1, 1, 2 * GROUP, 1, 1, 0, 0, ((int(out),), (ctypes.c_void_p,)), 0)
        found = np.empty(GROUP, np.uint32)
        driver("cuMemcpyDtoH", found.ctypes.data, out, found.nbytes)
        right &= found.tolist() == wanted
        print(f"{name}: {'right' if found.tolist() == wanted else 'wrong'}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
