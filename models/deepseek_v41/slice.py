"""A slice of the model as a checkpoint: true widths, chosen layers, fewer experts, smaller Engram tables, random weights in the true formats.

`python -m tapeout.models.deepseek_v41.slice --layers 0-2,8,14,20,21,24 --experts 16 -o DIR`. The configuration passes the same strict rules
as the released one; layers are numbered anew, and every list of layers with them. Same arguments, same bytes. A slice of real widths has
several gigabytes: make it on the machine that runs it.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tapeout.models.deepseek_v41.config import ModelConfig, load_config, parse_config, shipped_config
from tapeout.models.deepseek_v41.engram_primes import layer_primes
from tapeout.models.deepseek_v41.errors import ConfigError
from tapeout.models.deepseek_v41.tensors import Dtype, TensorSpec, scale_name, tensor_table
from tapeout.models.tiny import write_checkpoint, write_tokenizer
from tapeout.models.tiny.heads import EMBED_NORM, LOGIT_SPREAD, draw_for
from tapeout.models.tiny.tokenizer import token_map_json
from tapeout.models.tiny.weights import E4M3_RMS, Array, gain, stored_scale, stored_values

LARGE = 1 << 20  # elements from which a tensor is cut from a pool instead of drawn one by one
POOL = (1 << 22) - 3  # random elements of a pool; a prime, so that no two rows of a matrix begin at one place
ENGRAM_VOCABULARY = 65536  # rows of a hash table, about; the released model has 16 million
SHARDS = 8
MOST_LAYER = 4095  # of any configuration
HELP = "layers to keep, as 0-2,8,14; a compressed layer needs the source whose entries it reads"


def sliced(config: ModelConfig, layers: Sequence[int], experts: int, engram_vocabulary: int = ENGRAM_VOCABULARY) -> ModelConfig:
    """The configuration of a slice. Raises ConfigError with every rule that the choice breaks."""
    data = config.canonical()
    text, chosen = data["text_config"], sorted(set(layers))
    number = {old: new for new, old in enumerate(chosen)}
    if not chosen or chosen[0] < 0 or chosen[-1] >= config.layers:
        raise ValueError(f"--layers: found {chosen}, expected layers from 0 to {config.layers - 1}")
    text |= {
        "num_hidden_layers": len(chosen),
        "compress_ratios": [config.ratio(layer) for layer in chosen] + [0] * config.draft_stages,
        "n_routed_experts": experts,
        "num_experts_per_tok": min(experts, text["num_experts_per_tok"]),
        "dspark_n_routed_experts": min(experts, text["dspark_n_routed_experts"]),
        "dspark_num_experts_per_tok": min(experts, text["dspark_num_experts_per_tok"]),
    }
    for key in ("kv_source_layer_ids", "index_k_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        text[key] = [number[layer] for layer in text[key] if layer in number]
    text["dspark_target_layer_ids"] = _targets(config, chosen, number)
    text["candidate_source_layer_id"] = number.get(config.candidate_source, max(text["index_source_layer_ids"], default=0))
    text |= _engram(text, engram_vocabulary)
    data["vision_config"]["num_hidden_layers"] = 1
    made = parse_config(data, "slice")
    return parse_config(data | {"text_config": text | {"engram_compressed_vocab_size": _compressed_ids(made)}}, "slice")


def _targets(config: ModelConfig, chosen: list[int], number: dict[int, int]) -> list[int]:
    """As many layers for the draft as the model takes, the last ones of the same side of the boundary."""
    wanted = config.text.dspark_target_layer_ids
    side = [layer for layer in chosen if config.is_decoder(layer) == config.is_decoder(wanted[-1])]
    return [number[layer] for layer in side[-len(wanted) :]]


def _engram(text: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Table sizes as the rules compute them, and an upper bound of the compressed vocabulary."""
    layers, orders, heads = len(text["engram_layer_ids"]), text["engram_max_ngram_size"] - 1, text["engram_n_heads"]
    rows = [sum(map(sum, layer)) for layer in layer_primes(layers, orders, heads, vocabulary)]
    return {"engram_vocab_size": vocabulary, "engram_num_embeddings": rows, "engram_compressed_vocab_size": text["vocab_size"]}


def _compressed_ids(config: ModelConfig) -> int:
    """Ids behind the token map that the slice's tokenizer brings."""
    return max(json.loads(token_map_json(config))) + 1


class SliceTensors:
    """The tensors of a slice by name, made when asked for: the bytes that `write_slice` writes, for whoever needs no files."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self._config, self._seed, self._table = config, seed, tensor_table(config)
        self._weights = {scale_name(name): spec for name, spec in self._table.items() if spec.dtype is not Dtype.F8_E8M0}

    def tensor(self, name: str) -> Array:
        """Stored values; raises KeyError for a name that is not in the table."""
        spec = self._table[name]
        if spec.dtype is not Dtype.F8_E8M0:
            return slice_values(self._config, spec, self._seed)
        return stored_scale(self._weights[name], spec, self._seed)


def slice_values(config: ModelConfig, spec: TensorSpec, seed: int) -> Array:
    """Stored values of a tensor that is not a scale; large ones are cut from a pool of random codes, whose prime length keeps rows apart."""
    if int(np.prod(spec.shape)) < LARGE or spec.dtype is Dtype.F32:
        return stored_values(config, spec, seed)
    pool = _pool(spec.dtype, seed)
    if spec.dtype is Dtype.BF16:
        pool = _bfloat16(spec)[pool.view(np.uint8)]
    return _cut(pool, spec, seed)


def _cut(pool: Array, spec: TensorSpec, seed: int) -> Array:
    """The tensor's elements: the pool over and over, from a place that its name decides."""
    out = np.empty(int(np.prod(spec.shape)), pool.dtype)
    start = int(draw_for(seed, spec.name).integers(POOL))
    first = min(POOL - start, out.size)
    out[:first] = pool[start : start + first]
    for at in range(first, out.size, POOL):
        part = out[at : at + POOL]
        part[:] = pool[: part.size]
    return out.reshape(spec.shape)


@cache
def _pool(dtype: Dtype, seed: int) -> Array:
    """Random bytes: FP8 codes as 256 equally likely quantiles of a normal distribution, packed FP4 and BF16 indices as they come."""
    picks = draw_for(seed, f"pool {dtype}").integers(0, 256, POOL, dtype=np.uint8)
    return _quantiles(E4M3_RMS).astype(ml_dtypes.float8_e4m3fn)[picks] if dtype is Dtype.F8_E4M3 else picks


def _bfloat16(spec: TensorSpec) -> Array:
    spread = {"embed.weight": EMBED_NORM, "head.weight": LOGIT_SPREAD / np.sqrt(spec.shape[1])}
    return _quantiles(spread.get(spec.name, gain(spec.name) / np.sqrt(spec.shape[1]))).astype(ml_dtypes.bfloat16)


@cache
def _quantiles(deviation: float) -> NDArray[np.float32]:
    """The middles of 256 equally likely parts of a normal distribution."""
    normal = NormalDist(0, float(deviation))
    return np.array([normal.inv_cdf((i + 0.5) / 256) for i in range(256)], np.float32)


def write_slice(directory: str | Path, config: ModelConfig, seed: int = 0, shards: int = SHARDS) -> Path:
    """Writes the checkpoint folder of a sliced configuration; returns it. Raises OSError."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.canonical(), indent=2) + "\n")
    write_tokenizer(folder, config)
    write_checkpoint(folder, config, seed, shards, slice_values)
    return folder


def parse_layers(text: str) -> list[int]:
    """`"0-2,8"` as layers; raises ArgumentTypeError."""
    out: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", word)
        if found is None:
            raise argparse.ArgumentTypeError(f"found {text!r}; expected layers as 0-2,8,14")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last > MOST_LAYER:
            raise argparse.ArgumentTypeError(f"found {text!r}; expected layers up to {MOST_LAYER}, the smaller first, as 0-2,8,14")
        out += range(first, last + 1)
    return out


def parse_seed(text: str) -> int:
    """A seed; raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number of at most 18 digits")
    return int(text)


def parse_folder(text: str) -> str:
    """The name of a folder; raises ArgumentTypeError: an empty one would be the folder that the command runs in."""
    if not text:
        raise argparse.ArgumentTypeError("found an empty name; expected a folder, . for this one")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, writes, and returns the exit code: 0 written, 1 refused or not writable, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="python -m tapeout.models.deepseek_v41.slice", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=parse_folder, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--layers", type=parse_layers, required=True, help=HELP)
    parser.add_argument("--experts", type=int, default=16, help="routed experts of a layer")
    parser.add_argument("--engram-vocab", type=int, default=ENGRAM_VOCABULARY, help="rows of an Engram hash table, about")
    parser.add_argument("--config", default="v4.1-flash", help="v4.1-flash, tiny, or a config.json")
    parser.add_argument("--seed", type=parse_seed, default=0)
    parser.add_argument("--config-only", action="store_true", help="write config.json alone: enough to compile")
    given = parser.parse_args(arguments)
    try:
        whole = shipped_config(given.config) if given.config in ("v4.1-flash", "tiny") else load_config(given.config)
        config = sliced(whole, given.layers, given.experts, given.engram_vocab)
        if given.config_only:
            Path(given.output).mkdir(parents=True, exist_ok=True)
            Path(given.output, "config.json").write_text(json.dumps(config.canonical(), indent=2) + "\n")
        else:
            write_slice(given.output, config, given.seed)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {given.output}: cannot write: {error.strerror}; choose another folder", file=sys.stderr)
        return 1
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
