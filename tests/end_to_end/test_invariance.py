"""Same request, same bytes: a prompt's logits do not depend on the batch around it, its order, others' chunks, or the worker count."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.end_to_end.conftest import Model, prompt

BATCHES = (1, 2, 3, 7, 16, 44, 64)
SLOT = 5


@pytest.fixture(autouse=True)
def every_step_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps would stay on one worker: here they do not, so that worker counts are really compared."""
    monkeypatch.setattr("tapeout.runtime.program.BARRIER_SECONDS", 0.0)


def _decoded(model: Model, others: int, reverse: bool, workers: int) -> bytes:
    """Logits of one prompt and two decode steps with `others` further sequences in every step."""
    with model.engine(workers=workers) as engine:
        slots = [s for s in range(64) if s != SLOT][:others]
        asked = [(SLOT, prompt(7, 1)), *((s, prompt(5 + s % 3, 50 + s)) for s in slots)]
        seen = []
        for step in range(3):
            batch = asked if step == 0 else [(slot, [70 + (slot + step) % 100 if slot != SLOT else 90 + step]) for slot, _ in asked]
            batch = batch[::-1] if reverse else batch
            found = engine.forward(batch)
            seen.append(found[[slot for slot, _ in batch].index(SLOT)])
        return b"".join(x.tobytes() for x in seen)


@pytest.fixture(scope="module")
def alone(model: Model) -> bytes:
    return _decoded(model, 0, reverse=False, workers=1)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("reverse", [False, True], ids=["first", "last"])
def test_logits_do_not_depend_on_the_batch(model: Model, alone: bytes, rows: int, reverse: bool) -> None:
    assert _decoded(model, rows - 1, reverse, workers=1 + rows % 2) == alone


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_logits_do_not_depend_on_the_workers(model: Model, alone: bytes, workers: int) -> None:
    assert _decoded(model, 6, reverse=False, workers=workers) == alone


@pytest.mark.parametrize("sizes", [(40,), (1, 39), (7,) * 5 + (5,), (16, 16, 8), (33, 7)], ids=str)
def test_logits_do_not_depend_on_the_chunks_of_others(model: Model, sizes: Sequence[int]) -> None:
    def run(pieces: Sequence[int]) -> bytes:
        with model.engine(workers=1) as engine:
            other, at, seen = prompt(40, 9), 0, []
            for step in range(8):
                batch = [(SLOT, [80 + step])]
                if step < len(pieces):
                    batch.append((1, other[at : at + pieces[step]]))
                    at += pieces[step]
                seen.append(engine.forward(batch)[0])
            return np.concatenate(seen).tobytes()

    assert run(sizes) == run(())
