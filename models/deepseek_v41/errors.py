"""What can be wrong with a configuration, a checkpoint, a tokenizer or a chat request, and how it is said.

A `Problem` is one fault: code, place, found, expected, remedy. An `InputError` carries every problem of one input together,
so a user repairs a file once. `CODES` is the list that docs/model.md prints. Nothing here reads a file.
"""

from collections.abc import Iterable
from dataclasses import dataclass

CODES: dict[str, str] = {
    "M101": "the configuration file cannot be read",
    "M102": "the file is not JSON",
    "M103": "the JSON is not an object",
    "M104": "a JSON key appears twice",
    "M105": "a required key is missing",
    "M106": "a key is unknown",
    "M107": "a value has the wrong type",
    "M108": "a value is outside its allowed set or range",
    "M109": "two spellings of one setting disagree",
    "M110": "a list has the wrong length",
    "M111": "the layer topology is not one the architecture allows",
    "M112": "the candidate selection does not fit the index selection",
    "M113": "a width is not divisible as its storage format needs",
    "M114": "the Engram tables do not follow from the Engram settings",
    "M115": "the draft stages do not fit the backbone",
    "M116": "a rotary setting is not supported",
    "M201": "the checkpoint folder cannot be read",
    "M202": "the checkpoint index is malformed",
    "M203": "a shard named by the index is missing",
    "M204": "a shard's safetensors header is malformed",
    "M205": "the index places a tensor in a shard that does not hold it",
    "M206": "a shard holds a tensor that the index does not place there",
    "M207": "a tensor is present with and without the `model.` prefix",
    "M208": "two shards hold the same tensor",
    "M209": "a tensor of the model is missing",
    "M210": "a quantised weight has no scale",
    "M211": "a tensor is not part of the model",
    "M212": "a tensor has the wrong dtype",
    "M213": "a tensor has the wrong shape",
    "M214": "a scale tensor is all zero bytes",
    "M215": "a scale tensor holds the NaN byte",
    "M301": "the tokenizer cannot be read",
    "M302": "a special token is not where the model expects it",
    "M303": "the tokenizer has more ids than the vocabulary has rows",
    "M304": "the token compression does not yield the configured number of ids",
    "M305": "a token id is outside the vocabulary",
    "M306": "a chat request cannot be rendered",
    "M307": "a prompt is not text",
}


@dataclass(frozen=True)
class Problem:
    """One fault of one input. `path` is a key path, a file or a tensor name; `code` is a key of `CODES`."""

    code: str
    path: str
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.path}: {CODES[self.code]}: found {self.found}; expected {self.expected}; {self.fix}"


class InputError(Exception):
    """An input of the model is refused. Carries all its problems; `subject` names the file or folder."""

    noun = "input"

    def __init__(self, subject: str, problems: Iterable[Problem]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        count = len(self.problems)
        head = f"{subject}: {self.noun} refused, {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the problems, in the order they are reported."""
        return tuple(problem.code for problem in self.problems)


class ConfigError(InputError):
    """A configuration is refused (M101 to M116)."""

    noun = "model configuration"


class CheckpointError(InputError):
    """A checkpoint is refused (M201 to M215)."""

    noun = "checkpoint"


class TokenizerError(InputError):
    """A tokenizer, a token id or a token compression is refused (M301 to M305, M307)."""

    noun = "tokenizer"


class ChatError(InputError):
    """A chat request cannot be rendered (M306)."""

    noun = "chat request"


def shown(value: object, limit: int = 60) -> str:
    """Returns a short, single-line text of a found value, cut to `limit` characters."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
