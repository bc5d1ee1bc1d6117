"""The tensor table and its sums: every count of model spec 10, 11 and 12, exactly."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.ledger import (
    Component,
    LedgerRow,
    StateLedger,
    active_ledger,
    state_ledger,
    weight_ledger,
)
from tapeout.models.deepseek_v41.tensors import Dtype, Part, tensor_table

FLASH = shipped_config("v4.1-flash")
TINY = shipped_config("tiny")


def released_names() -> Iterator[str]:
    for line in (Path(__file__).parent / "tensor-names.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        parts = [part for part in re.split(r"(\{[^}]*\})", line) if part]
        yield from map("".join, itertools.product(*map(_choices, parts)))


def _choices(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    if ".." in part:
        first, last = map(int, part[1:-1].split(".."))
        return [str(number) for number in range(first, last + 1)]
    return part[1:-1].split(",")


def test_released_names_are_mapped_one_to_one() -> None:
    names = list(released_names())
    assert len(names) == 96_085 and set(names) == set(tensor_table(FLASH))


def test_bytes_by_dtype_are_those_of_the_released_headers() -> None:
    ledger = weight_ledger(FLASH)
    assert {dtype.value: count for dtype, count in ledger.bytes_by_dtype} == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }


def test_ledger_of_the_released_model() -> None:
    ledger = weight_ledger(FLASH)
    assert [(row.name, row.tensors, row.parameters, row.size_bytes) for row in ledger.groups] == [
        ("embed", 1, 661_913_600, 1_323_827_200),
        ("lm head + final norm", 2, 661_918_720, 1_323_837_440),
        ("attention dense", 400, 5_064_622_080, 5_069_568_000),
        ("layer norms, q/kv norms, sinks", 200, 483_840, 972_800),
        ("compressors", 11, 18_352_128, 36_704_256),
        ("indexers", 32, 43_516_416, 45_130_752),
        ("mHC mixers", 240, 39_323_760, 157_295_040),
        ("gates", 120, 78_673_920, 157_409_280),
        ("routed experts", 92_160, 543_581_798_400, 288_777_830_400),
        ("shared experts", 240, 1_415_577_600, 1_416_960_000),
        ("Engram projections and gates", 8, 314_654_720, 315_043_840),
        ("Engram tables", 4, 196_613_849_600, 202_758_032_400),
    ]
    assert {row.name: row.parameters for row in ledger.draft_groups} == {
        "routed experts": 13_589_544_960,
        "attention dense": 379_846_656,
        "shared experts": 106_168_320,
        "main_proj": 78_643_200,
        "Markov head": 66_191_360,
        "mHC mixers": 2_949_282,
        "gates": 1_966_848,
        "layer norms, q/kv norms, sinks": 46_528,
        "confidence head": 5_376,
    }
    assert ledger.backbone == LedgerRow("backbone", 93_414, 551_880_835_184, 298_624_579_008)
    assert ledger.engram_tables == LedgerRow("Engram tables", 4, 196_613_849_600, 202_758_032_400)
    assert ledger.draft == LedgerRow("DSpark", 2_401, 14_225_362_530, 7_932_874_632)
    assert ledger.vision == LedgerRow("vision", 266, 485_268_480, 970_536_960)
    assert ledger.total == LedgerRow("total", 96_085, 763_205_315_794, 510_286_023_000)


def test_ledger_of_the_tiny_model() -> None:
    ledger = weight_ledger(TINY)
    assert (ledger.total.tensors, ledger.total.parameters) == (642, 5_847_136)
    groups = {row.name: row.parameters for row in ledger.groups}
    engram = groups["Engram projections and gates"] + groups["Engram tables"]
    assert engram == 938_240
    assert ledger.backbone.parameters - groups["Engram projections and gates"] == 3_861_308
    assert (ledger.draft.parameters, ledger.vision.parameters) == (870_948, 176_640)


def test_blocks_hold_what_the_spec_counts() -> None:
    table = tensor_table(FLASH)
    blocks = Counter(name.split(".")[1] for name in table if name.startswith("layers."))
    extra = {1: 6, 2: 8, 8: 8, 14: 14, 20: 7, 24: 3, 28: 3, 32: 3, 36: 3}
    assert blocks == {str(layer): 2334 + extra.get(layer, 0) for layer in range(40)}
    assert Counter(spec.part for spec in table.values()) == {Part.TEXT: 93_418, Part.DRAFT: 2_401, Part.VISION: 266}


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.39.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.39.attn.wo_b.scale", "F8_E8M0", (160, 256)),
        ("layers.7.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.7.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.7.ffn.experts.0.w1.weight", "I8", (2304, 2560)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
    ],
)
def test_dtype_and_shape(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    spec = tensor_table(FLASH)[name]
    assert (spec.dtype, spec.shape) == (Dtype(dtype), shape)


def test_the_boundary_layer_has_no_compressor_gate() -> None:
    table = tensor_table(FLASH)
    assert [l for l in range(40) if f"layers.{l}.attn.compressor.wgate.weight" in table] == [2, 8, 14]
    assert [l for l in range(40) if f"layers.{l}.attn.compressor.wkv.weight" in table] == [2, 8, 14, 20]


def test_the_table_of_the_released_model_takes_no_second() -> None:
    start = time.process_time()
    tensor_table(FLASH)
    assert time.process_time() - start < 1.0


def test_active_parameters_per_token() -> None:
    ledger = active_ledger(FLASH)
    assert ledger.components == (
        Component("attention dense", 2_532_311_040, 2_532_311_040),
        Component("routed experts", 4_246_732_800, 4_246_732_800),
        Component("shared expert", 707_788_800, 707_788_800),
        Component("gates", 39_321_600, 39_321_600),
        Component("mHC mixers", 19_660_800, 19_660_800),
        Component("compressors", 15_728_640, 2_621_440),
        Component("index K", 196_608, 65_536),
        Component("index Q + weights", 16_220_160, 27_033_600),
        Component("Engram projection", 314_572_800, 0),
    )
    assert (ledger.encoder, ledger.decoder) == (7_892_533_248, 7_575_535_616)
    assert (ledger.prefill, ledger.decode, ledger.head) == (7_895_220_224, 15_468_068_864, 661_913_600)
    assert (round(ledger.prefill_flops / 1e9, 2), round(ledger.decode_flops / 1e9, 2)) == (15.79, 32.26)
    assert (ledger.draft_token, ledger.draft_feature) == (1_504_444_416, 78_643_200 + 7_864_320)


def test_state_of_a_sequence() -> None:
    assert state_ledger(FLASH) == StateLedger(
        window_entry=528,
        main_entry=288,
        index_entry=68,
        compressor_slot=4096,
        bytes_per_token=890,
        encoder_rings=1_415_040,
        decoder_rings=1_627_296,
        compressor_rings=86_016,
        bytes_per_sequence=3_128_928,
    )
    tiny = state_ledger(TINY)
    # 128-wide heads: 128 + 4 and 64 + 8 bytes, index 64 + 4; sources of ratio 2 and 1; 22 slots; unit lcm(32, 132).
    assert (tiny.window_entry, tiny.main_entry, tiny.index_entry) == (132, 72, 68)
    assert tiny.bytes_per_token == 140 // 2 + 140
    assert (tiny.encoder_rings, tiny.decoder_rings) == (3 * 22 * 132, 5 * 22 * 132)
    assert tiny.compressor_rings == 7 * 1024
    assert tiny.bytes_per_sequence == 30_624
