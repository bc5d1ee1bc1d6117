"""The native executor: runs a list of launches on one worker, with a barrier between launches when there are several workers.

`void tapeout_execute(const void *launches, int64_t count, int64_t worker, int64_t workers, int64_t *barrier)`; a launch is {function,
buffers}. The barrier is one counter that only grows (zero it once, before the first use): arriving adds one, and a worker passes when
the counter has reached the next multiple of `workers`. After a thousand looks it yields its time slice, so that more workers than cores
still finish.
"""

from tapeout.dialects._mlir import ir

NAME = "tapeout_execute"

_TEXT = """
llvm.func internal @wait(%barrier: !llvm.ptr, %workers: i64) {
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  %patience = llvm.mlir.constant(1000 : i64) : i64
  %before = llvm.atomicrmw add %barrier, %one acq_rel : !llvm.ptr, i64
  %round = llvm.udiv %before, %workers : i64
  %next = llvm.add %round, %one : i64
  %goal = llvm.mul %next, %workers : i64
  llvm.br ^look(%zero : i64)
^look(%looks: i64):
  %now = llvm.load %barrier atomic acquire {alignment = 8 : i64} : !llvm.ptr -> i64
  %open = llvm.icmp "uge" %now, %goal : i64
  llvm.cond_br %open, ^passed, ^again
^again:
  llvm.call_intrinsic "llvm.x86.sse2.pause"() : () -> ()
  %more = llvm.add %looks, %one : i64
  %tired = llvm.icmp "ugt" %more, %patience : i64
  llvm.cond_br %tired, ^yield, ^look(%more : i64)
^yield:
  %sched_yield = llvm.mlir.constant(24 : i64) : i64
  %ignored = llvm.inline_asm has_side_effects asm_dialect = att "syscall",
      "={rax},{rax},~{rcx},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}" %sched_yield : (i64) -> i64
  llvm.br ^look(%zero : i64)
^passed:
  llvm.return
}

llvm.func @tapeout_execute(%launches: !llvm.ptr, %count: i64, %worker: i64, %workers: i64, %barrier: !llvm.ptr) {
  %zero = llvm.mlir.constant(0 : i64) : i64
  %one = llvm.mlir.constant(1 : i64) : i64
  llvm.br ^head(%zero : i64)
^head(%i: i64):
  %more = llvm.icmp "slt" %i, %count : i64
  llvm.cond_br %more, ^launch, ^done
^launch:
  %entry = llvm.getelementptr %launches[%i] : (!llvm.ptr, i64) -> !llvm.ptr, !llvm.struct<(ptr, ptr)>
  %function = llvm.load %entry : !llvm.ptr -> !llvm.ptr
  %second = llvm.getelementptr %entry[0, 1] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(ptr, ptr)>
  %buffers = llvm.load %second : !llvm.ptr -> !llvm.ptr
  llvm.call %function(%buffers, %worker, %workers) : !llvm.ptr, (!llvm.ptr, i64, i64) -> ()
  %next = llvm.add %i, %one : i64
  %shared = llvm.icmp "sgt" %workers, %one : i64
  llvm.cond_br %shared, ^barrier, ^head(%next : i64)
^barrier:
  llvm.call @wait(%barrier, %workers) : (!llvm.ptr, i64) -> ()
  llvm.br ^head(%next : i64)
^done:
  llvm.return
}
"""


def executor_module() -> ir.Module:
    """The executor in the LLVM dialect, in the current context."""
    return ir.Module.parse(_TEXT)
