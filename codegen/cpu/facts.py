"""What is known of the CPUs that kernels are built for: instruction sets by LLVM name, vector registers, stack.

`x86-64-v3` is the default and the same on every host; `native` is this host's flags as Linux lists them. Nothing else may ask what the
host is.
"""

from dataclasses import dataclass
from pathlib import Path

BASELINE = "x86-64-v3"
NATIVE = "native"

_BASELINE_FEATURES = (
    "64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr", "lzcnt", "mmx", "movbe",
    "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3", "x87", "xsave",
)  # fmt: skip

# Linux flag -> LLVM feature, where kernels can gain from it; the rest would only split the cache of binaries.
_LINUX_FLAGS = {
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512cd": "avx512cd", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2", "avx512_vnni": "avx512vnni",
    "avx512_bitalg": "avx512bitalg", "avx512_vpopcntdq": "avx512vpopcntdq", "avx512_bf16": "avx512bf16", "avx_vnni": "avxvnni",
    "gfni": "gfni", "vaes": "vaes", "vpclmulqdq": "vpclmulqdq", "adx": "adx", "sha_ni": "sha", "fsgsbase": "fsgsbase",
}  # fmt: skip
_LINUX_NAMES_OF_BASELINE = {
    "avx", "avx2", "bmi1", "bmi2", "cmov", "cx16", "cx8", "f16c", "fma", "fxsr", "abm", "mmx", "movbe", "popcnt", "lahf_lm", "sse", "sse2",
    "pni", "sse4_1", "sse4_2", "ssse3", "xsave",
}  # fmt: skip


class CpuError(ValueError):
    """A CPU that kernels cannot be built for or run on."""


@dataclass(frozen=True)
class Cpu:
    """One build target. `features` is the whole list, sorted; `vector_registers` of `vector_bits` hold the sums of a product."""

    name: str
    features: tuple[str, ...]
    vector_bits: int
    vector_registers: int
    stack_bytes: int = 1024 * 1024  # of one kernel: threads have 8 MiB by default, some systems give 2

    @property
    def target_cpu(self) -> str:
        """LLVM's name of the model whose instruction costs are used."""
        return BASELINE

    @property
    def linux_flags(self) -> tuple[str, ...]:
        """What /proc/cpuinfo must list on a host that runs kernels for this target."""
        extra = {flag for flag, feature in _LINUX_FLAGS.items() if feature in self.features}
        return tuple(sorted(_LINUX_NAMES_OF_BASELINE | extra))


def cpu(name: str = BASELINE) -> Cpu:
    """The target of a name; raises `CpuError` for another name, or where `native` lacks what every build needs."""
    if name == BASELINE:
        return _of(BASELINE, _BASELINE_FEATURES)
    if name == NATIVE:
        return _of(NATIVE, (*_BASELINE_FEATURES, *host_features()))
    raise CpuError(f"no CPU target is called {name!r}; there are {BASELINE} and {NATIVE}")


def _of(name: str, features: tuple[str, ...]) -> Cpu:
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(features)
    return Cpu(name, tuple(sorted(set(features))), 512 if wide else 256, 32 if wide else 16)


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """LLVM features beyond the baseline that every core of this host has; raises `CpuError` where it lacks the baseline."""
    flags = _flags(cpuinfo)
    missing = sorted(_LINUX_NAMES_OF_BASELINE - flags)
    if missing:
        raise CpuError(f"this host lacks {', '.join(missing)}, which {BASELINE} needs; build and run on a newer CPU")
    return tuple(sorted(feature for flag, feature in _LINUX_FLAGS.items() if flag in flags))


def _flags(cpuinfo: Path) -> set[str]:
    try:
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
    except OSError as error:
        raise CpuError(f"{cpuinfo} cannot be read ({error.strerror}); --cpu native needs Linux, use {BASELINE}") from error
    if not lines:
        raise CpuError(f"{cpuinfo} lists no flags; --cpu native needs an x86-64 Linux host, use {BASELINE}")
    return set.intersection(*(set(line.split(":", 1)[1].split()) for line in lines))
