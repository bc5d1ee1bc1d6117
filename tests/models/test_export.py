"""Weights to checkpoint: rounding against a search over all codes, decoding by the reference's own formulas, bytes, shards, refusals."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ModelConfig, shipped_config
from tapeout.models.deepseek_v41.errors import CheckpointError
from tapeout.models.deepseek_v41.reference import formats
from tapeout.models.deepseek_v41.tensors import Dtype, Part, scale_name, tensor_table
from tapeout.models.tiny import write_tokenizer
from tapeout.models.tiny.export import SHARD_BYTES, decoded, export_checkpoint, rounded, shards_of, stored

CONFIG = shipped_config("tiny")
TABLE = tensor_table(CONFIG)
CONFIG_FILE = Path(__file__).parents[2] / "models/deepseek_v41/config-tiny.json"
LINEAR, TABLE_ROWS, EXPERT = "layers.0.attn.wq_a.weight", "layers.1.engram.embed.weight", "layers.0.ffn.experts.0.w1.weight"
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _weights(config: ModelConfig) -> dict[str, Any]:
    """Every text and draft tensor, with magnitudes that differ from group to group and a group of zeros."""
    found = {}
    for n, (name, spec) in enumerate(tensor_table(config).items()):
        if spec.dtype is not Dtype.F8_E8M0 and spec.part is not Part.VISION:
            shape = (*spec.shape[:-1], spec.shape[-1] * (2 if spec.dtype is Dtype.I8 else 1))
            draw = np.random.default_rng(n)
            values = draw.standard_normal(shape) * 2.0 ** draw.integers(-9, 3, (*shape[:-1], -(-shape[-1] // 32))).repeat(32, -1)[..., : shape[-1]]
            values[..., :32] *= n % 7 != 0
            found[name] = values.astype(np.float32)
    return found


WEIGHTS = _weights(CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("exported")
    write_tokenizer(found, CONFIG)
    export_checkpoint(found, CONFIG, CONFIG_FILE, found, WEIGHTS)
    return found


def _nearest(value: float, codes: np.ndarray) -> set[float]:
    """All codes that are as near as any."""
    gaps = np.abs(codes - value)
    return set(codes[gaps == gaps.min()].tolist())


@pytest.mark.parametrize(("name", "height", "largest"), [(LINEAR, 32, 448.0), (TABLE_ROWS, 1, 448.0), (EXPERT, 1, 6.0)])
def test_groups_get_the_least_scale_and_the_nearest_code(name: str, height: int, largest: float) -> None:
    spec, values = TABLE[name], WEIGHTS[name][:64]
    scale = TABLE[scale_name(name)]
    codes, exponents = stored(spec, values, scale._replace(shape=(len(values) // height, scale.shape[1])))
    found = decoded(spec, codes, exponents)
    assert exponents is not None
    finite = E4M3[np.isfinite(E4M3)] if largest == 448 else np.concatenate([E2M1, -E2M1])
    for row in range(0, 64, 13):
        for group in range(values.shape[1] // 32):
            block = values[row // height * height :][:height, 32 * group : 32 * group + 32].astype(np.float64)
            exponent = int(exponents[row // height, group]) - 127
            if not block.any():
                assert exponent == -126
                continue
            assert np.abs(block).max() <= largest * 2.0**exponent
            assert np.abs(block).max() > largest * 2.0 ** (exponent - 1)
            for column in range(32 * group, 32 * group + 32, 5):
                assert found[row, column] / 2.0**exponent in _nearest(float(values[row, column]) / 2.0**exponent, finite)


def test_halves_go_to_the_even_code() -> None:
    halves = np.zeros((1, 32), np.float32)
    halves[0, :9] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25]
    spec = TABLE[EXPERT]._replace(shape=(1, 16))
    found = decoded(spec, *stored(spec, halves, TABLE[scale_name(EXPERT)]._replace(shape=(1, 1))))
    assert found[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0]
    assert np.array_equal(found[0, :9], formats.round_e2m1(halves[0, :9]))


def test_rounding_again_changes_nothing() -> None:
    once = rounded(CONFIG, WEIGHTS)
    twice = rounded(CONFIG, once)
    assert [name for name in once if once[name].tobytes() != twice[name].tobytes()] == []
    assert sum(once[name].tobytes() != WEIGHTS[name].tobytes() for name in once) > 300


def test_the_checkpoint_decodes_to_what_was_rounded(folder: Path) -> None:
    """Read by the checkpoint reader, decoded by the reference's formulas, not by this module's."""
    checkpoint, expected = open_checkpoint(folder, CONFIG), rounded(CONFIG, WEIGHTS)
    for name, spec in TABLE.items():
        if spec.dtype is Dtype.F8_E8M0 or name not in expected:
            continue
        found, scale = checkpoint.tensor(name), TABLE.get(scale_name(name))
        if scale is not None:
            decode = {LINEAR: formats.decode_fp8_blocks, TABLE_ROWS: formats.decode_fp8_rows, EXPERT: formats.decode_fp4_rows}
            kind = EXPERT if spec.dtype is Dtype.I8 else TABLE_ROWS if scale.shape[0] == spec.shape[0] else LINEAR
            found = decode[kind](found, checkpoint.tensor(scale.name), np.float32)
        assert np.array_equal(np.asarray(found, np.float32), expected[name]), name
        if spec.dtype is not Dtype.F32:
            assert np.array_equal(expected[name].astype(ml_dtypes.bfloat16).astype(np.float32), expected[name]), name


def test_same_weights_same_bytes(folder: Path, tmp_path: Path) -> None:
    export_checkpoint(tmp_path, CONFIG, CONFIG_FILE, folder, dict(reversed(WEIGHTS.items())))
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in files if (folder / name).read_bytes() != (tmp_path / name).read_bytes()] == []


def test_shards_stay_below_their_limit() -> None:
    million = 1 << 20
    assert shards_of([million]) == 1
    assert shards_of([million] * 5) == 1
    assert shards_of([million] * 6) == 2  # the header needs its share
    assert shards_of([million] * 12) == 3
    assert shards_of([SHARD_BYTES - 1000, 5, SHARD_BYTES - 1000]) >= 2
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 3 * million, 40)]
    count, held, before = shards_of(sizes), [0] * 60, 0
    for size in sizes:
        held[min(before * count // sum(sizes), count - 1)] += size
        before += size
    assert max(held) <= SHARD_BYTES


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = dict(WEIGHTS)
    del wrong["head.weight"]
    wrong["norm.weight"] = np.zeros(3, np.float32)
    wrong["layers.9.attn_norm.weight"] = np.zeros(128, np.float32)
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(tmp_path / "none", CONFIG, CONFIG_FILE, tmp_path, wrong)
    assert [(problem.code, problem.path) for problem in caught.value.problems] == [
        ("M209", "head.weight"), ("M213", "norm.weight"), ("M211", "layers.9.attn_norm.weight")]  # fmt: skip
    assert not (tmp_path / "none").exists()


def test_training_rounds_as_storage_does() -> None:
    """What the straight-through casts of training pretend is what is stored, for every tensor, bit for bit."""
    torch = pytest.importorskip("torch", reason="torch is an extra that only training needs")
    from tapeout.models.tiny.differentiable.casts import Numerics
    from tapeout.models.tiny.differentiable.weights import formats_of, load_weights, stored_arrays
    from tapeout.models.tiny.differentiable.weights import rounded as trained

    with torch.no_grad():
        found = stored_arrays(trained(load_weights(CONFIG, WEIGHTS), formats_of(CONFIG), Numerics.faithful()))
    expected = rounded(CONFIG, WEIGHTS)
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []
