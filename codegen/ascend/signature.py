"""How a lowered kernel is launched: its device functions and what they take, read from the lowered module.

The compiler puts a flag address in front unless it is told not to, and drops the instance ids, so the module is what counts, not the contract.
"""

import re
from dataclasses import dataclass

from tapeout.codegen.ascend.toolchain import CompileError

ROLES = {"ffts_base_address": "ffts", "sync_block_lock": "lock", "workspace": "workspace"}
GRID = ("grid_x", "grid_y", "grid_z")
BUFFERS = "buffers"
SPLIT = ("_mix_aic", "_mix_aiv")
_FUNCTION = re.compile(r'"func\.func"\(\) <\{arg_attrs = \[([^\]]*)\], function_type = \((.*?)\) -> \(\), sym_name = "([\w.$]+)"\}>')


@dataclass(frozen=True)
class Signature:
    """Device functions of a kernel, and what each of them takes in order; BUFFERS stands for all buffers of a launch."""

    functions: tuple[str, ...]
    arguments: tuple[str, ...]


def signature(name: str, module: str) -> Signature:
    """Of kernel `name`; raises `CompileError` where its functions are missing, differ, or take something unknown."""
    found = {m[3]: _arguments(m[1], m[2]) for m in _FUNCTION.finditer(module) if m[3] in (name, *(name + end for end in SPLIT))}
    arguments = next(iter(found.values()), None)
    if arguments is None or set(found.values()) != {arguments}:
        raise CompileError(f"kernel {name} was lowered to {', '.join(found) or 'no device function'} with arguments that are not known here")
    return Signature(tuple(sorted(found)), arguments)


def _arguments(attributes: str, types: str) -> tuple[str, ...] | None:
    """Words for the arguments; None for a list that is not lead, buffers and grid."""
    words = re.findall(r"\{(?:hacc\.arg_type = #hacc\.arg_type<(\w+)>)?\}", attributes)
    lead = [ROLES.get(word) for word in words if word]
    kinds = re.findall(r"memref<[^>]*(?:<\w+>)?[^>]*>|\w+", types)
    buffers = kinds[len(lead) : -len(GRID)]
    is_known = all(lead) and words[: len(lead)] == [w for w in words if w] and kinds[-len(GRID) :] == ["i32"] * len(GRID)
    if not is_known or not all(kind.startswith("memref<?x") for kind in buffers) or len(words) != len(kinds):
        return None
    return (*(word for word in lead if word), BUFFERS, *GRID)
