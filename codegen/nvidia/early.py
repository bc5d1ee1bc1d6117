"""Whether a kernel may begin before the launch in front of it has ended, read off its PTX: it must wait before anything that another launch
could see or change (the whole rule: runtime/device/early.py).

Every path from the entry is followed up to its wait. What may stand there: sums of addresses, shared memory, reads of weights and of the launch's
count. An emitted kernel reads its count and nothing else; that an override reads nothing but weights, or what the launch in front waited for
where that is its kernel's own, is its template's word.

Tensor memory (SM100) is asked for first of all, and a block is held there until enough columns are free. Nobody waits for ever: who holds columns
waits for launches in front only, and every block of those has had its columns since before it let this launch begin.
"""

import re
from collections.abc import Iterator

WAIT, GO = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_LABEL = re.compile(r"^([\w$]+):\s*(.*)", re.DOTALL)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([\w$]+)")
_ENDS = re.compile(r"^(ret|exit|trap|bra|brx|call)\b")
_IF = r"^(@!?\S+\s+)?"
_OWN = r"[\w.:]*(param|shared|local|const)"
_SHOWS = re.compile(
    _IF + rf"(ret|exit|brx|call|st\.(?!{_OWN})|red\.|atom|multimem|tensormap\.[\w.:]*global|cp\.(reduce\.)?async\.bulk\.(tensor\.\dd\.)?global|"
    rf"{re.escape(GO)})"
)
_READS = re.compile(_IF + rf"(ldu?\.(?!{_OWN})|cp\.async\.c[ag]|cp\.async\.bulk\.(tensor\.\dd\.)?shared)")


def waits(ptx: str, *, reads: int | None, groups: bool) -> bool:
    """Whether all paths wait in time, with at most `reads` reads in front (None: any number). In a kernel of several groups of warps others may
    wait at a barrier for the one that waits, which a path does not show: there it is enough that one waits."""
    if WAIT not in ptx:
        return False
    if groups:
        return GO not in ptx.partition(WAIT)[0]
    front = list(_in_front(_statements(ptx)))
    return not any(_SHOWS.match(s) for s in front) and (reads is None or sum(bool(_READS.match(s)) for s in front) <= reads)


def _statements(ptx: str) -> list[str]:
    """Statements and labels of the entry's body."""
    body = re.sub(r"//.*", "", ptx)
    body = body[body.index("{", body.index(".entry")) + 1 :]
    found = []
    for piece in re.split(r"[;\n]", body.replace("{\n", "\n")):
        text = piece.strip().lstrip("{").strip()
        while (label := _LABEL.match(text)) and not text.startswith("::"):
            found.append(label[1] + ":")
            text = label[2].strip()
        if text.strip("} "):
            found.append(text)
    return found


def _in_front(statements: list[str]) -> Iterator[str]:
    """Statements that may run before a wait; the end counts as `ret`."""
    labels: dict[str, list[int]] = {}
    for number, text in enumerate(statements):
        if text.endswith(":"):
            labels.setdefault(text[:-1], []).append(number)  # inline text may use a name again
    seen, paths = set[int](), [0]
    while paths:
        at = paths.pop()
        while at not in seen:
            seen.add(at)
            text = statements[at] if at < len(statements) else "ret"
            if text.startswith(WAIT):
                break
            yield text
            if branch := _BRANCH.search(text):
                paths += labels.get(branch[1], [len(statements)])
            if _ENDS.match(text):
                break
            at += 1
