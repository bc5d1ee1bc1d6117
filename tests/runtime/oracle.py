"""Drafts that know the answer: what speculation does when drafts are right, wrong, and anything between."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tapeout.runtime.engine import Engine


def foretell(engine: Engine, answers: Mapping[int, Sequence[int]], right: float, seed: int = 0) -> None:
    """Makes the engine draft what its sequences will say: `answers` are whole sequences by the seed of their request.

    Each drafted token is the true one with probability `right`, else its neighbour. Confidence logits say which, not quite surely.
    """
    programs, rng = engine.programs, random.Random(seed)
    draft_behind, block, vocabulary = programs.draft_behind, engine.artifact.draft_block, engine.vocabulary

    def told(outputs: Any, draws: Any) -> None:
        draft_behind(outputs, draws)
        drafts, confidences = programs.array("drafts"), programs.array("confidences")
        for i, (own, position) in enumerate(zip(draws.seeds.tolist(), draws.positions.tolist(), strict=True)):
            rest = list(answers[own][position + 1 : position + 1 + block])
            true = np.array(rest + [0] * (block - len(rest)))
            hits = np.array([rng.random() < right for _ in range(block)])
            drafts[i] = np.where(hits, true, (true + 1) % vocabulary)
            confidences[i] = np.where(hits, 2.0, -1.0)

    programs.draft_behind = told  # type: ignore[method-assign]
