"""Settings of one compile: a frozen object that is passed down; nothing below reads the environment.

Every rule is checked here, all problems are reported together.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tapeout.codegen.tuned_rows import TunedRow
from tapeout.compiler.errors import SettingsError
from tapeout.compiler.targets import MODULES
from tapeout.passes.bucket_rows import MOST_ROWS

TARGETS = tuple(MODULES)
CPUS = ("x86-64-v3", "native")
MEBIBYTE = 1 << 20
MOST_CONTEXT = 1 << 24
"""Positions that float32 counts exactly, as angle tables need."""
MOST_WORKSPACE = 1 << 20
"""MiB."""
MOST_BUCKETS = 64


@dataclass(frozen=True)
class Settings:
    """What `tapeout compile` was asked for. Rows are of one step, tokens of one sequence; `buckets` empty means the default list.

    `target` is one target or several, as "sm90,cpu".
    """

    target: str = "cpu"
    max_rows: int = 512
    max_sequences: int = 8
    max_outputs: int = 512
    max_context: int = 4096
    block_tokens: int = 128
    workspace_bytes: int = 256 * MEBIBYTE
    cpu: str = "x86-64-v3"
    buckets: tuple[int, ...] = ()
    jobs: int = 2
    dump: Path | None = None
    print_ir_after: tuple[str, ...] = ()
    stop_after: str | None = None
    check_passes: bool = False
    tuned: tuple[TunedRow, ...] = ()

    def __post_init__(self) -> None:
        wrong = [
            f"{OPTIONS[f.name]}: found {getattr(self, f.name)!r}, expected {_KINDS[f.name][0]}"
            for f in fields(self)
            if not self._fits(f.name)
        ]
        if wrong:
            raise SettingsError(wrong)
        problems = [sentence for fact, sentence in self._rules() if not fact]
        if problems:
            raise SettingsError(problems)

    def _fits(self, name: str) -> bool:
        return _KINDS[name][1](getattr(self, name))

    def _rules(self) -> list[tuple[bool, str]]:
        ascending = list(self.buckets) == sorted(set(self.buckets))
        return [
            (set(self.targets) <= set(TARGETS), f"--target: found {self.target!r}, expected one of {', '.join(TARGETS)}"),
            (len(set(self.targets)) == len(self.targets) > 0, f"--target: found {self.target!r}, expected each target once"),
            (
                not self.tuned or len(self.targets) == 1,
                f"--tuning: rows are those of one target, found {self.target}; compile each with its own",
            ),
            (self.cpu in CPUS, f"--cpu: found {self.cpu}, expected one of {', '.join(CPUS)}"),
            (1 <= self.max_rows <= MOST_ROWS, f"--max-rows: found {self.max_rows}, expected 1 to {MOST_ROWS}"),
            (
                1 <= self.max_sequences <= self.max_rows,
                f"--max-sequences: found {self.max_sequences}, expected 1 to --max-rows ({self.max_rows})",
            ),
            (
                self.max_sequences <= self.max_outputs <= MOST_ROWS,
                f"--max-outputs: found {self.max_outputs}, expected --max-sequences ({self.max_sequences}) to {MOST_ROWS}",
            ),
            (1 <= self.max_context <= MOST_CONTEXT, f"--max-context: found {self.max_context}, expected 1 to {MOST_CONTEXT}"),
            (
                2 <= self.block_tokens <= MOST_ROWS and self.block_tokens % 2 == 0,
                f"--block-tokens: found {self.block_tokens}, expected a multiple of 2 (the widest compression ratio) up to {MOST_ROWS}",
            ),
            (
                MEBIBYTE <= self.workspace_bytes <= MOST_WORKSPACE * MEBIBYTE,
                f"--workspace: found {self.workspace_bytes / MEBIBYTE:.12g} MiB, expected 1 to {MOST_WORKSPACE} MiB",
            ),
            (1 <= self.jobs <= 256, f"--jobs: found {self.jobs}, expected 1 to 256"),
            (ascending and all(b >= 1 for b in self.buckets), f"--row-buckets: found {list(self.buckets)}, expected ascending counts"),
            (len(self.buckets) <= MOST_BUCKETS, f"--row-buckets: found {len(self.buckets)} counts, expected at most {MOST_BUCKETS}"),
            (
                not self.buckets or self.buckets[-1] == self.max_rows,
                f"--row-buckets: the last one is {self.buckets[-1] if self.buckets else 0}, expected --max-rows ({self.max_rows})",
            ),
        ]

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets, in the order given."""
        return tuple(self.target.split(","))

    def for_target(self, target: str) -> "Settings":
        """The same settings for one of the targets; what is dumped goes into a folder of its own where there are several."""
        if self.targets == (target,):
            return self
        return replace(self, target=target, dump=self.dump / target if self.dump is not None else None)

    @property
    def outputs(self) -> int:
        """Rows of a step that may ask for logits."""
        return min(self.max_outputs, self.max_rows)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """The buckets to plan for: a small one for decoding, a middle one, the largest step."""
        return self.buckets or tuple(sorted({*(b for b in (16, 128) if b < self.max_rows), self.max_rows}))


OPTIONS = {f.name: "--" + f.name.replace("_", "-") for f in fields(Settings)} | {
    "workspace_bytes": "--workspace",
    "buckets": "--row-buckets",
    "tuned": "--tuning",
}
"""How the command line calls each setting."""

Fits = Callable[[Any], bool]


def _is_count(value: object) -> bool:
    return type(value) is int


def _is_tuple_of(kind: type) -> Fits:
    return lambda value: isinstance(value, tuple) and all(type(item) is kind for item in value)


_COUNT: tuple[str, Fits] = ("a whole number", _is_count)
_WORD: tuple[str, Fits] = ("text", lambda value: isinstance(value, str))
_KINDS: dict[str, tuple[str, Fits]] = {
    "target": _WORD,
    **dict.fromkeys(("max_rows", "max_sequences", "max_outputs", "max_context", "block_tokens", "workspace_bytes", "jobs"), _COUNT),
    "cpu": _WORD,
    "buckets": ("a tuple of whole numbers", _is_tuple_of(int)),
    "dump": ("a path or None", lambda value: value is None or isinstance(value, Path)),
    "print_ir_after": ("a tuple of names", _is_tuple_of(str)),
    "stop_after": ("a name or None", lambda value: value is None or isinstance(value, str)),
    "check_passes": ("True or False", lambda value: isinstance(value, bool)),
    "tuned": ("rows as `read_tuning` gives them", _is_tuple_of(TunedRow)),
}
"""What type each setting has, in words and as a test: checked before any rule."""


def parse_dump(text: str | None) -> Path | None:
    """The folder to dump into; raises `SettingsError` for an empty name, which would be the folder that the command runs in."""
    if text == "":
        raise SettingsError(["--dump: found '', expected the path of a folder"])
    return None if text is None else Path(text)


def parse_buckets(text: str) -> tuple[int, ...]:
    """`"16,128,512"` as row counts; raises `SettingsError` where a word is no number."""
    words = text.split(",") if text.strip() else []
    try:
        return tuple(int(w) for w in words)
    except ValueError:
        raise SettingsError([f"--row-buckets: found {text!r}, expected row counts as 16,128,512"]) from None
