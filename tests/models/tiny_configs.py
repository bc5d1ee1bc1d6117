"""The tiny configuration as a mutable document, in both spellings, for tests of the data side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tapeout.models import deepseek_v41

FOLDER = Path(deepseek_v41.__file__).parent
RATES = {"compressed_sparse_attention": 2, "full_attention": 1}


def tiny_document() -> dict[str, Any]:
    """A fresh copy of config-tiny.json: six layers, two draft stages."""
    document: dict[str, Any] = json.loads((FOLDER / "config-tiny.json").read_text())
    return document


def respelled(document: dict[str, Any]) -> dict[str, Any]:
    """The same configuration in the second spelling (model spec 2.3)."""
    text = document["text_config"]
    names = {0: "sliding_attention", **{rate: name for name, rate in RATES.items()}}
    text["layer_types"] = [names[ratio] for ratio in text.pop("compress_ratios")]
    text["compress_rates"] = dict(RATES)
    text["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": text.pop("rope_theta")},
        "compress": {"rope_theta": text.pop("compress_rope_theta"), **text.pop("rope_scaling")},
    }
    return document
