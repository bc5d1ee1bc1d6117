"""From float32 weights by tensor name to a checkpoint folder in the storage formats of docs/model.md 9.1.

`stored` is the only rounding of weights here: what training pretends to store must equal `decoded`, and tests hold the two together.
Deterministic: same weights, same bytes. Vision tensors are not trained and not used on the text path; where no array is given they get
the random values of the tiny checkpoint.

    python -m tapeout.models.tiny.export WEIGHTS.npz --config FILE --tokenizer DIR -o DIR
"""

import argparse
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig, load_config
from tapeout.models.deepseek_v41.errors import CheckpointError, InputError, Problem
from tapeout.models.deepseek_v41.tensors import SCALE_BLOCK, Dtype, Part, TensorSpec, scale_name, tensor_table
from tapeout.models.tiny import write_shards
from tapeout.models.tiny.weights import Array, stored_values

Floats = NDArray[np.float32]
Weights = Mapping[str, Floats]
"""Logical values by tensor name, without scales; FP4 tensors have their unpacked width."""

SHARD_BYTES = 6 * 2**20  # small enough that retrained draft stages replace one shard of the trained checkpoint, not all
E4M3_MAX, E2M1_MAX = 448.0, 6.0
HEADER_BYTES = 160  # at most, of a shard's header for one tensor
BIAS = 127
LEAST_EXPONENT = -126  # of a scale: a group of zeros still gets a scale that is no zero byte
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "engram_token_map.json")
BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)  # between the magnitudes of E2M1
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def export_checkpoint(folder: Path, config: ModelConfig, config_file: Path, tokenizer: Path, weights: Weights) -> None:
    """Writes config, tokenizer, shards of at most `SHARD_BYTES` and their index. Raises `CheckpointError` for missing or misshapen arrays."""
    problems = [*_problems(config, weights)]
    if problems:
        raise CheckpointError("weights to export", problems)
    folder.mkdir(parents=True, exist_ok=True)
    _copy(config_file, folder / "config.json")
    for name in TOKENIZER_FILES:
        _copy(tokenizer / name, folder / name)
    tensors = sorted(stored_tensors(config, weights), key=lambda pair: _serves_drafts(pair[0]))
    write_shards(folder, tensors, shards_of([spec.size_bytes for spec, _ in tensors]))


def _serves_drafts(spec: TensorSpec) -> bool:
    """Whether training the draft stages alone changes a tensor: theirs, and the noise token's row of the embedding."""
    return spec.part is not Part.TEXT or spec.name == "embed.weight"


def stored_tensors(config: ModelConfig, weights: Weights) -> Iterator[tuple[TensorSpec, Array]]:
    """Yields every tensor of the table with its stored bytes, scales behind their weights."""
    table = tensor_table(config)
    for name, spec in table.items():
        if spec.dtype is Dtype.F8_E8M0:
            continue  # follows its weight
        if name not in weights:
            yield spec, stored_values(config, spec, seed=0)
            continue
        codes, scales = stored(spec, weights[name], table.get(scale_name(name)))
        yield spec, codes
        if scales is not None:
            yield table[scale_name(name)], scales


def stored(spec: TensorSpec, values: Floats, scale: TensorSpec | None = None) -> tuple[Array, NDArray[np.uint8] | None]:
    """Returns the stored form of float32 `values` and the bytes of its scale.

    A group's scale is the smallest power of two that keeps its largest magnitude in range; codes round to nearest, ties to even.
    """
    match spec.dtype:
        case Dtype.F8_E4M3 if scale is not None:
            exponents = _exponents(values, E4M3_MAX, values.shape[0] == scale.shape[0])
            scaled = np.ldexp(values, -_spread(exponents, values.shape))
            return scaled.astype(ml_dtypes.float8_e4m3fn), (exponents + BIAS).astype(np.uint8)
        case Dtype.I8 if scale is not None:
            exponents = _exponents(values, E2M1_MAX, True)
            return _packed(np.ldexp(values, -_spread(exponents, values.shape))), (exponents + BIAS).astype(np.uint8)
        case Dtype.BF16:
            return values.astype(ml_dtypes.bfloat16), None
        case Dtype.F32:
            return np.asarray(values, np.float32), None
    raise ValueError(f"{spec.name}: a {spec.dtype.value} tensor with scale {scale} has no rule of rounding; correct the tensor table")


def decoded(spec: TensorSpec, codes: Array, scales: NDArray[np.uint8] | None) -> Floats:
    """Returns the float32 values that `stored` kept."""
    if scales is None:
        return codes.astype(np.float32)
    exponents = scales.astype(np.int32) - BIAS
    if spec.dtype is Dtype.F8_E4M3:
        return np.asarray(np.ldexp(codes.astype(np.float32), _spread(exponents, codes.shape)))
    packed = codes.view(np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    values = np.where(nibbles & 8, -MAGNITUDES[nibbles & 7], MAGNITUDES[nibbles & 7])
    return np.asarray(np.ldexp(values, _spread(exponents, values.shape)))


def rounded(config: ModelConfig, weights: Weights) -> dict[str, Floats]:
    """Returns every weight as its checkpoint will hold it: what straight-through rounding in training must equal."""
    table = tensor_table(config)
    return {name: decoded(table[name], *stored(table[name], values, table.get(scale_name(name)))) for name, values in weights.items()}


def shards_of(sizes: list[int]) -> int:
    """The fewest shards, cut in order into runs of about equal bytes, of which none is above `SHARD_BYTES`."""
    total = sum(sizes)
    for count in range(max(1, -(-total // SHARD_BYTES)), len(sizes) + 1):
        held, before = [0] * count, 0
        for size in sizes:
            held[min(before * count // total, count - 1)] += size
            before += size
        if max(held) + HEADER_BYTES * len(sizes) <= SHARD_BYTES:
            return count
    return len(sizes)


def _exponents(values: Floats, largest: float, by_row: bool) -> NDArray[np.int32]:
    """Exponent of each group's scale: groups of 32 columns of one row, or blocks of 32 rows too."""
    rows, columns = values.shape
    height = 1 if by_row else SCALE_BLOCK
    padded = np.pad(np.abs(values), ((0, -rows % height), (0, -columns % SCALE_BLOCK)))
    blocks = padded.reshape(padded.shape[0] // height, height, -1, SCALE_BLOCK).max((1, 3))
    mantissa, exponent = np.frexp(blocks / np.float32(largest))
    needed = np.where(blocks > 0, exponent - (mantissa == 0.5), LEAST_EXPONENT)
    return np.maximum(needed, LEAST_EXPONENT).astype(np.int32)


def _spread(exponents: NDArray[np.int32], shape: tuple[int, ...]) -> NDArray[np.int32]:
    """Repeats one exponent a group to one a value."""
    height = 1 if exponents.shape[0] == shape[0] else SCALE_BLOCK
    return np.repeat(np.repeat(exponents, height, 0)[: shape[0]], SCALE_BLOCK, 1)[:, : shape[1]]


def _packed(scaled: Floats) -> NDArray[np.uint8]:
    """E2M1 codes of values within 6, two to the byte, the even column low."""
    magnitude = np.abs(scaled)
    below, above = np.searchsorted(BOUNDS, magnitude, "left"), np.searchsorted(BOUNDS, magnitude, "right")
    codes = np.where(below % 2 == 0, below, above)  # on a bound the even code: 0.25 to 0, 0.75 to 1
    codes = (codes | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8)
    return np.asarray(codes[:, 0::2] | (codes[:, 1::2] << 4))


def _problems(config: ModelConfig, weights: Weights) -> Iterator[Problem]:
    table = tensor_table(config)
    for name, spec in table.items():
        if spec.dtype is Dtype.F8_E8M0 or (spec.part is Part.VISION and name not in weights):
            continue
        shape = (*spec.shape[:-1], spec.shape[-1] * (2 if spec.dtype is Dtype.I8 else 1))
        if name not in weights:
            yield Problem("M209", name, "no array", f"float32 {list(shape)}", "export the weights of this configuration")
        elif weights[name].shape != shape:
            yield Problem("M213", name, str(list(weights[name].shape)), str(list(shape)), "export the weights of this configuration")
    for name in weights:
        if name not in table or table[name].dtype is Dtype.F8_E8M0:
            yield Problem("M211", name, "an array", "logical weights of the table alone", "leave it out")


def _copy(source: Path, target: Path) -> None:
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)


def main() -> int:
    """The command; returns 0, or 1 with the refusal on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tapeout.models.tiny.export", description="Writes trained weights as a checkpoint.")
    parser.add_argument("weights", type=Path, help="float32 weights by tensor name, as numpy saves them")
    parser.add_argument("--config", type=Path, required=True, help="the configuration they were trained for")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer and token map")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write; made when absent")
    given = parser.parse_args()
    try:
        export_checkpoint(given.output, load_config(given.config), given.config, given.tokenizer, _read(given.weights))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(given.output)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(str(path), [Problem("M201", path.name, str(error), "an .npz file", "write it again")]) from error


if __name__ == "__main__":
    sys.exit(main())
