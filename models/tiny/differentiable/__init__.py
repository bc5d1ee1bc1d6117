"""The text model in torch, to be trained: the function of the numpy reference, with gradients.

Casts pass gradients straight through; selections are hard, as in the model, and index scores learn from an attention target of
their own. Imports torch, an extra that only training needs: nothing outside this package and `train.py` imports it.
"""

from .casts import Numerics
from .model import Differentiable, Output
from .weights import Weights, initial_weights, load_weights, stored_arrays

__all__ = ["Differentiable", "Numerics", "Output", "Weights", "initial_weights", "load_weights", "stored_arrays"]
