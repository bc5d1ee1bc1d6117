"""A plain forward pass of the text model, written from the model spec without the dialects.

The oracle of the project: `exact` for what the formulas mean, `faithful` for what the casts make of them. Only tests use it.
"""

from .model import Reference, argmax
from .state import DraftOutput, LayerRecord, Output, SequenceState

__all__ = ["DraftOutput", "LayerRecord", "Output", "Reference", "SequenceState", "argmax"]
