"""Weights between two runs and after the last one, small enough to carry.

On the way (`save_state`): every tensor of two or more dimensions as int8 with one float16 scale per 32 columns, an error of 0.4 % of a
typical weight, where an FP4 step is sixty times that; small tensors stay float32. The optimiser's state is not kept: a resumed run
warms up again. At the end (`exact`): values that are rounded to their formats already, kept bit for bit.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .weights import Weights

_GROUP = 32
_LEVELS = 127.0
_DESCRIPTION = "about.json"


def save_state(folder: Path, weights: Weights, about: dict[str, Any], *, exact: bool = False, parts: int = 2) -> None:
    """Writes `part-0.npz.xz` and so on, tensors dealt out by size, and `about.json`; `exact` asks for values as stored."""
    folder.mkdir(parents=True, exist_ok=True)
    shares: list[dict[str, np.ndarray]] = [{} for _ in range(parts)]
    filled = [0] * parts
    for name, value in sorted(weights.items(), key=lambda item: -item[1].numel()):
        least = filled.index(min(filled))
        filled[least] += value.numel()
        shares[least] |= _exact(name, value) if exact else _packed(name, value)
    for number, share in enumerate(shares):
        aside = folder / f"part-{number}.partial"
        with lzma.open(aside, "wb", preset=0) as file:
            np.savez(file, **share)  # type: ignore[arg-type]
        aside.replace(folder / f"part-{number}.npz.xz")
    (folder / _DESCRIPTION).write_text(json.dumps(about) + "\n")


def load_state(folders: list[Path]) -> tuple[Weights, dict[str, Any]]:
    """Reads the parts that lie in any of the folders."""
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.glob("part-*.npz.xz")):
            with lzma.open(path, "rb") as file, np.load(file) as found:
                arrays |= dict(found)
        if (folder / _DESCRIPTION).exists():
            about = json.loads((folder / _DESCRIPTION).read_text())
    return {name: _unpacked(name, arrays) for name in arrays if not name.endswith((" scale", " exponent"))}, about


def _packed(name: str, value: Tensor) -> dict[str, np.ndarray]:
    wide = value.detach().float().cpu()
    if wide.dim() < 2 or wide.shape[-1] % _GROUP:
        return {name: wide.numpy()}
    groups = wide.unflatten(-1, (-1, _GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / _LEVELS).clamp(min=1e-7).half()
    codes = torch.round(groups / scale.float()).clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {name: codes.flatten(-2).numpy(), f"{name} scale": scale[..., 0].numpy()}


def _exact(name: str, value: Tensor) -> dict[str, np.ndarray]:
    """BF16 and FP32 as they are; FP8 and FP4 as E4M3 with a power of two per 32 columns, which holds both without loss."""
    wide = value.detach().float().cpu()
    if torch.equal(wide.bfloat16().float(), wide) and wide.dim() >= 2 and wide.shape[-1] % _GROUP == 0:
        groups = wide.unflatten(-1, (-1, _GROUP))
        exponent = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 448))
        codes = (groups * torch.exp2(-exponent)).to(torch.float8_e4m3fn)
        if torch.equal(codes.float() * torch.exp2(exponent), groups):
            return {name: codes.flatten(-2).view(torch.uint8).numpy(), f"{name} exponent": exponent[..., 0].to(torch.int8).numpy()}
    if torch.equal(wide.bfloat16().float(), wide):
        return {name: wide.bfloat16().view(torch.int16).numpy()}
    return {name: wide.numpy()}


def _unpacked(name: str, arrays: dict[str, np.ndarray]) -> Tensor:
    codes = torch.from_numpy(arrays[name])
    if codes.dtype == torch.int16:
        return codes.view(torch.bfloat16).float()
    if f"{name} exponent" in arrays:
        exponent = torch.from_numpy(arrays[f"{name} exponent"]).float()
        values = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, _GROUP))
        return (values * torch.exp2(exponent)[..., None]).flatten(-2)
    if f"{name} scale" not in arrays:
        return codes
    scale = torch.from_numpy(arrays[f"{name} scale"]).float()
    return (codes.float().unflatten(-1, (-1, _GROUP)) * scale[..., None]).flatten(-2)
