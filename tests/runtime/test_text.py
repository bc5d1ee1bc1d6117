"""Stop strings on the text as it comes: found wherever they begin and end, held back until they cannot be one (docs/runtime.md, 1.4)."""

import random

import pytest

from tapeout.runtime.text import StopText


class Pieces:
    """A stream whose token i is a given text."""

    def __init__(self, texts: list[str], rest: str = "") -> None:
        self.texts, self.rest = texts, rest

    def push(self, token: int) -> str:
        return self.texts[token]

    def finish(self) -> str:
        return self.rest


def run(texts: list[str], stops: list[str], rest: str = "") -> tuple[list[str], str, str | None]:
    """What each push gave out, what `finish` gave, and the stop string."""
    text = StopText(Pieces(texts, rest), stops)
    given = []
    for token in range(len(texts)):
        given.append(text.push(token))
        if text.stop is not None:
            break
    last = text.finish()
    assert text.text == "".join(given) + last
    return given, last, text.stop


@pytest.mark.parametrize(
    ("texts", "stops", "given", "last", "stop"),
    [
        (["ab", "cd"], ["xyz"], ["", "ab"], "cd", None),
        (["ab", "cd", "ef"], ["cd"], ["a", "b"], "", "cd"),
        (["a", "EN", "D", "b"], ["END"], ["", "a", ""], "", "END"),
        (["a EN", "Z"], ["END"], ["a ", "E"], "NZ", None),
        (["x", "", "y"], ["y"], ["x", "", ""], "", "y"),
        (["one stop two end"], ["end", "stop"], ["one "], "", "stop"),
        (["aab"], ["ab", "aab"], [""], "", "aab"),
        (["aab"], ["aa", "aab"], [""], "", "aab"),
        (["é", "😀", "!"], ["😀!"], ["", "é", ""], "", "😀!"),
        ([""], ["a"], [""], "", None),
    ],
)
def test_stop_strings(texts: list[str], stops: list[str], given: list[str], last: str, stop: str | None) -> None:
    assert run(texts, stops) == (given, last, stop)


def test_what_the_stream_held_back_can_complete_a_stop_string() -> None:
    assert run(["ab"], ["b\ufffd"], rest="\ufffd") == (["a"], "", "b\ufffd")
    assert run(["ab"], ["bc"], rest="\ufffd") == (["a"], "b\ufffd", None)


def test_against_a_plain_search() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        texts = ["".join(rng.choice("ab") for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(0, 8))]
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        given, last, stop = run(texts, stops)
        so_far, expected = "", None
        for piece in texts:
            so_far += piece
            places = [(so_far.find(s), -len(s), s) for s in stops if s in so_far]
            if places:
                expected = min(places)
                break
        assert stop == (expected[2] if expected else None)
        assert "".join(given) + last == (so_far[: expected[0]] if expected else "".join(texts))
