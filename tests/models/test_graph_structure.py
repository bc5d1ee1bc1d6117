"""The shape of the graph: functions and what passes between them, who owns which state, order of ring writes, names, refusals."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tapeout.dialects._mlir import ir
from tapeout.dialects.text import parse, sugar
from tapeout.dialects.types import Blocks, Ring, Tensor, from_ir
from tapeout.models.deepseek_v41 import weights
from tapeout.models.deepseek_v41.config import LayerKind, ModelConfig, shipped_config
from tapeout.models.deepseek_v41.graph import GraphError, GraphOptions, build_graph, weight_sources
from tapeout.models.deepseek_v41.graph_states import state_sources
from tapeout.models.deepseek_v41.tensors import Dtype, Part, tensor_table
from tapeout.models.deepseek_v41.weights import Rotary, TokenMap

OPTIONS = {"tiny": GraphOptions(3, 256, 16), "v4.1-flash": GraphOptions(64, 131072)}
READERS = ("mla.attend", "mla.pool", "engram.lookback")
HOST = {"tokens", "positions", "slots", "starts", "ends", "floors", "block_table", "kept", "kept_starts", "kept_ends", "kept_floors",
        "outputs", "temperature", "top_k", "top_p", "seeds", "sample_slots", "sample_positions", "golden_rows", "draft_positions",
        "draft_slots", "draft_temperature", "draft_top_k", "draft_top_p", "draft_seeds"}


@pytest.fixture(scope="module", params=["tiny", "v4.1-flash"])
def built(request: pytest.FixtureRequest) -> Iterator[tuple[ModelConfig, ir.Module]]:
    config = shipped_config(request.param)
    with ir.Context():
        yield config, build_graph(config, OPTIONS[request.param])


def functions(module: ir.Module) -> dict[str, Any]:
    return {f.name.value: f for f in module.body}


def facts(attributes: Any) -> list[dict[str, str]]:
    """The tapeout.* attributes of arguments or results, without their prefix."""
    return [{a.name.removeprefix("tapeout."): ir.StringAttr(a.attr).value for a in ir.DictAttr(row)} for row in attributes]


def arguments(function: Any) -> dict[str, tuple[dict[str, str], ir.Value]]:
    return {row["name"]: (row, value) for row, value in zip(facts(function.arg_attrs), function.arguments, strict=True)}


def results(function: Any) -> dict[str, ir.Type]:
    return {row["name"]: type_ for row, type_ in zip(facts(function.attributes["res_attrs"]), function.type.results, strict=True)}


def operations(function: Any) -> list[Any]:
    return [op.operation for op in function.entry_block.operations]


def count(function: Any) -> Counter[str]:
    return Counter(op.name for op in operations(function))


def test_real_model_builds_in_seconds() -> None:
    start = time.process_time()
    with ir.Context():
        build_graph(shipped_config("v4.1-flash"), OPTIONS["v4.1-flash"])
    assert time.process_time() - start < 10


def test_every_function_has_the_ops_of_its_layers(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    made = functions(module)
    assert list(made) == ["step", "encoder", "decoder", "sample", "draft"]
    boundary, stages = config.n_prefill, config.draft_stages
    layers = {"encoder": range(boundary), "decoder": range(boundary, config.layers)}
    for name, own in layers.items():
        found = count(made[name])
        assert found["mla.attend"] == found["moe.combine"] == len(own)
        assert found["mhc.mixer"] == found["mhc.expand"] == 2 * len(own)
        sources = [l for l in own if config.layer_kind(l) in (LayerKind.FULL, LayerKind.REINDEX)]
        assert sum(found[f"mla.{op}"] for op in ("select", "select_candidates", "select_within")) == len(sources)
        assert found["mla.select_within"] == sum(config.uses_candidates(l) for l in own)
    encoder, decoder, draft = (count(made[name]) for name in ("encoder", "decoder", "draft"))
    assert encoder["mla.pool"] == sum(config.ratio(l) == 2 for l in config.text.kv_source_layer_ids)
    assert encoder["cache.append"] == 2 * len(config.text.kv_source_layer_ids) and decoder["cache.append"] == draft["cache.append"] == 0
    assert encoder["engram.gate"] == count(made["step"])["engram.hash"] == len(config.text.engram_layer_ids)
    assert decoder["mla.select_candidates"] == 1 and encoder["mla.select_candidates"] == 0
    assert decoder["mhc.mean"] == len(config.text.dspark_target_layer_ids) and encoder["mhc.mean"] == 0
    assert draft["mla.attend"] == stages and draft["sample.draw"] == draft["dspark.correct"] == config.text.dspark_block_size


def test_every_draw_of_a_position_has_its_own_stream(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    draws = {name: [op for op in operations(functions(module)[name]) if op.name == "sample.draw"] for name in ("sample", "draft")}
    streams = {name: [ir.IntegerAttr(op.attributes["stream"]).value for op in ops] for name, ops in draws.items()}
    assert streams == {"sample": [0], "draft": list(range(1, 1 + config.text.dspark_block_size))}


def test_size_of_the_real_graph(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    found = {name: sum(count(f).values()) for name, f in functions(module).items()}
    real = {"step": 15, "encoder": 684, "decoder": 672, "sample": 3, "draft": 121}
    tiny = {"step": 15, "encoder": 127, "decoder": 128, "sample": 3, "draft": 91}
    assert found == (real if config.layers == 40 else tiny)


def test_text_form_reads_back(built: tuple[ModelConfig, ir.Module]) -> None:
    _, module = built
    text = sugar(module.operation.get_asm())
    assert sugar(parse(text).operation.get_asm()) == text
    assert "nn.linear(" in text and '"nn.linear"(' not in text


def test_values_pass_between_functions_under_one_name_and_type(built: tuple[ModelConfig, ir.Module]) -> None:
    """An input is the host's or an earlier function's result of the same name and type; no result is named like a host input."""
    _, module = built
    known: dict[str, ir.Type] = {}
    for name, function in functions(module).items():
        for argument, (row, value) in arguments(function).items():
            if row["kind"] == "input" and argument not in HOST:
                assert value.type == known[argument], (name, argument)
            known.setdefault(argument, value.type)
            assert value.type == known[argument], (name, argument)
        assert not set(results(function)) & HOST
        known |= results(function)
    assert {"sampled", "logprobs", "logits", "drafts", "confidences"} <= set(known)


def test_inputs_name_their_extent(built: tuple[ModelConfig, ir.Module]) -> None:
    _, module = built
    extents = {"rows", "kept", "outputs", "sequences"}
    for function in functions(module).values():
        for name, (row, value) in arguments(function).items():
            view = from_ir(value.type)
            is_ragged = isinstance(view, Tensor) and view.shape[0] is None
            assert is_ragged == (row.get("extent") in extents), name
            assert row["kind"] == "input" or not is_ragged, name


def test_only_the_row_axis_is_dynamic_and_floats_are_real(built: tuple[ModelConfig, ir.Module]) -> None:
    _, module = built
    for function in functions(module).values():
        for op in operations(function):
            assert op.name != "nn.quantize"
            for value in op.results:
                view = from_ir(value.type)
                assert isinstance(view, Tensor) and None not in view.shape[1:], value
                # Log-probabilities are read by the host, in FP32.
                assert view.number.element in ("f64", "i32") or op.name == "sample.draw", value


def test_every_operand_of_the_checkpoint_is_used(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    taken = {name: row["kind"] for f in functions(module).values() for name, (row, _) in arguments(f).items()}
    used = {name: kind for name, kind in taken.items() if kind in ("weight", "table")}
    sources = weight_sources(config)
    assert used == {name: source.kind for name, source in sources.items()}
    stored = [name for source in sources.values() for name in (*source.tensors, *source.scales)]
    wanted = [name for name, spec in tensor_table(config).items() if spec.part is not Part.VISION and not name.endswith("bias_vl")]
    twice = [f"mtp.{stage}.attn.wkv.{part}" for stage in range(config.draft_stages) for part in ("weight", "scale")]
    assert sorted(stored) == sorted([*wanted, *twice])


def test_weight_views_follow_the_table(built: tuple[ModelConfig, ir.Module]) -> None:
    config, _ = built
    text, sources, table = config.text, weight_sources(config), tensor_table(config)
    experts = sources["layers.0.ffn.experts.w2"]
    assert str(experts.view) == f"[{text.n_routed_experts}, {text.hidden_size}, {text.moe_intermediate_size}] f4E2M1FN*e8m0[1x32]"
    assert experts.tensors[3] == "layers.0.ffn.experts.3.w2.weight" and experts.scales[3] == "layers.0.ffn.experts.3.w2.scale"
    first = text.engram_layer_ids[0]
    assert str(sources[f"layers.{first}.engram.embed"].view).endswith("f8E4M3FN*e8m0[1x32]")
    for source in sources.values():
        scaling = source.view.number.scaling
        for name, scale in zip(source.tensors, source.scales, strict=bool(source.scales)):
            assert scaling is not None
            shape = table[name].shape if table[name].dtype is not Dtype.I8 else (table[name].shape[0], 2 * table[name].shape[1])
            assert scaling.blocks(shape) == table[scale].shape
    plain, compressed, ids = (sources[n].derived for n in ("rotary.plain", "rotary.compressed", "engram.token_map"))
    assert plain == Rotary(0, 10000.0, None, 64, text.max_position_embeddings)
    assert compressed == Rotary(1, 160000.0, text.rope_scaling, 64, text.max_position_embeddings)
    assert ids == TokenMap(2)


def test_tensors_that_are_one_operand(monkeypatch: pytest.MonkeyPatch, built: tuple[ModelConfig, ir.Module]) -> None:
    """Of one matrix: the rows of each, in the order of the table; of experts: expert by expert. A name in another place is left alone."""
    config, _ = built
    text, names = config.text, ("w1", "w3")
    monkeypatch.setattr(weights, "TOGETHER", ((r".*\.ffn\.(shared_)?experts", names), (r"layers\.0\.attn", ("wq_a", "wkv"))))
    sources = weight_sources(config)
    inner, hidden, low = text.moe_intermediate_size, text.hidden_size, text.q_lora_rank
    experts, shared, first = (sources[f"layers.0.{name}"] for name in ("ffn.experts.w1+w3", "ffn.shared_experts.w1+w3", "attn.wq_a+wkv"))
    assert experts.tensors == tuple(f"layers.0.ffn.experts.{e}.{w}.weight" for e in range(text.n_routed_experts) for w in names)
    assert experts.scales == tuple(name.replace("weight", "scale") for name in experts.tensors)
    assert experts.view.shape == (text.n_routed_experts, 2 * inner, hidden) and experts.rows == (inner, inner)
    assert shared.tensors == tuple(f"layers.0.ffn.shared_experts.{w}.weight" for w in names)
    assert shared.view.shape == (2 * inner, hidden) and shared.rows == (inner, inner)
    assert first.view.shape == (low + text.head_dim, hidden) and first.rows == (low, text.head_dim)
    assert not {"layers.0.ffn.experts.w1", "layers.0.attn.wkv", "layers.1.attn.wq_a+wkv"} & set(sources)
    assert sources["layers.1.attn.wkv"].rows == () and sources["layers.0.ffn.experts.w2"].rows == ()


def test_who_owns_which_state(built: tuple[ModelConfig, ir.Module]) -> None:
    """Windows: every layer and stage. Pairs, entries, keys: KV sources, written in @encoder only, the boundary layer's included."""
    config, module = built
    boundary, sources = config.n_prefill, config.text.kv_source_layer_ids
    window = {f"layers.{l}.attn.window" for l in range(config.layers)}
    drafts = {f"mtp.{i}.attn.window" for i in range(config.draft_stages)}
    entries = {f"layers.{l}.attn.{name}" for l in sources for name in ("entries", "keys")}
    pairs = {f"layers.{l}.attn.compressor" for l in sources if config.ratio(l) == 2}
    encoder = {f"layers.{l}.attn.window" for l in range(boundary)}
    writers = ("cache.stage", "cache.commit", "cache.append", "step.remember")
    written = {name: states_of(f, writers) for name, f in functions(module).items()}
    assert written == {"step": {"history"}, "encoder": encoder | entries | pairs, "decoder": (window - encoder) | drafts,
                       "sample": {"last"}, "draft": drafts}
    assert states_of(functions(module)["draft"], ("cache.commit",)) == set()
    assert set(state_sources(config)) == window | drafts | entries | pairs | {"history", "last"}
    made = {name: row for f in functions(module).values() for name, (row, _) in arguments(f).items() if row["kind"] == "state"}
    formats = {"window": "q8", "entries": "q4main", "keys": "q4index", "compressor": "f32", "history": None, "last": None}
    assert all(row.get("format") == formats[name.rsplit(".", 1)[-1]] for name, row in made.items())


def states_of(function: Any, names: tuple[str, ...]) -> set[str]:
    handles = {value: name for name, (_, value) in arguments(function).items()}
    return {handles[v] for op in operations(function) if op.name in names for v in op.operands if not isinstance(from_ir(v.type), Tensor)}


def test_state_lengths_follow_from_the_draft_block(built: tuple[ModelConfig, ir.Module]) -> None:
    config, _ = built
    states, text = state_sources(config), config.text
    length = {name: state.view.length for name, state in states.items() if isinstance(state.view, Ring)}
    ratio = {name: state.view.ratio for name, state in states.items() if isinstance(state.view, Blocks)}
    assert {n for name, n in length.items() if name.endswith("window")} == {text.sliding_window + 6}
    assert {n for name, n in length.items() if name.endswith("compressor")} == {7}
    assert (length["history"], length["last"]) == (text.engram_max_ngram_size + 5, 1)
    assert all(value == config.ratio(int(name.split(".")[1])) for name, value in ratio.items())


def test_rings_are_staged_then_read_then_committed(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    seen = 0
    for function in functions(module).values():
        places: dict[ir.Value, dict[str, list[int]]] = {}
        for i, op in enumerate(operations(function)):
            for value in op.operands:
                if isinstance(from_ir(value.type), Ring):
                    kind = "read" if op.name in READERS else op.name
                    places.setdefault(value, {}).setdefault(kind, []).append(i)
        for value, found in places.items():
            if "cache.stage" not in found:
                assert from_ir(value.type).length == 1, value
                continue
            order = [*found["cache.stage"], *found.get("read", []), *found.get("cache.commit", [])]
            assert order == sorted(order) and len(found["cache.stage"]) == 1 and len(found.get("cache.commit", [])) <= 1, value
            seen += 1
    pairs = sum(config.ratio(l) == 2 for l in config.text.kv_source_layer_ids)
    assert seen == 1 + config.layers + pairs + 2 * config.draft_stages


def test_ops_of_a_layer_are_one_run_and_engram_comes_first(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    runs = {}
    for name, function in functions(module).items():
        labels = [_label(op) for op in operations(function)]
        runs[name] = [label for i, label in enumerate(labels) if label and label != (labels[i - 1] if i else None)]
    boundary, drafts = config.n_prefill, [f"draft.{i}" for i in range(config.draft_stages)]
    assert runs == {"step": [], "encoder": [f"layers.{l}" for l in range(boundary + 1)], "sample": [], "draft": drafts,
                    "decoder": [f"layers.{l}" for l in range(boundary, config.layers)] + drafts}
    ops = operations(functions(module)["encoder"])
    for layer in config.text.engram_layer_ids:
        assert [op.name for op in ops if _label(op) == f"layers.{layer}"][:2] == ["nn.linear", "engram.gate"]


def test_rows_of_engram_tables_are_asked_for_a_layer_ahead(built: tuple[ModelConfig, ir.Module]) -> None:
    """A lookup is no part of a layer: it stands in front of the layer before its own, or of its own where that is the first."""
    config, module = built
    ops = operations(functions(module)["encoder"])
    labels = [_label(op) for op in ops]
    found = [(i, op) for i, op in enumerate(ops) if op.name == "engram.lookup"]
    assert len(found) == len(config.text.engram_layer_ids) > 0
    for layer, (at, op) in zip(sorted(config.text.engram_layer_ids), found, strict=True):
        assert labels[at] is None and labels[at + 1] == f"layers.{max(layer - 1, 0)}" and str(op.location) == f'loc("layers.{layer}.engram.rows")'
        (use,) = op.results[0].uses
        assert _label(use.owner.operation) == f"layers.{layer}"


def _label(op: Any) -> str | None:
    return ir.StringAttr(op.attributes["tapeout.layer"]).value if "tapeout.layer" in op.attributes else None


def test_layers_of_one_kind_are_written_alike(built: tuple[ModelConfig, ir.Module]) -> None:
    """What outlining relies on: layers of one kind, without Engram or taps, have the same ops in the same order."""
    config, module = built
    plain = [l for l in range(config.n_prefill) if l not in config.text.engram_layer_ids]
    alike: dict[Any, set[tuple[str, ...]]] = {}
    for l in plain:
        ops = tuple(op.name for op in operations(functions(module)["encoder"]) if _label(op) == f"layers.{l}")
        alike.setdefault((config.layer_kind(l), config.ratio(l)), set()).add(ops)
    assert alike and all(len(forms) == 1 for forms in alike.values())


def test_documented_fp32_results_are_wide(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    wide = Counter()
    for function in functions(module).values():
        names = {value: name for name, (_, value) in arguments(function).items()}
        linears = [op for op in operations(function) if op.name == "nn.linear"]
        wide.update(names[op.operands[1]] for op in linears if ir.BoolAttr(op.attributes["wide"]).value)
    last = f"mtp.{config.draft_stages - 1}"
    owners = [l for l in config.text.kv_source_layer_ids if config.ratio(l) == 2]
    pairs = [f"layers.{l}.attn.compressor.wgate+wkv" for l in owners]
    assert wide == {"head": 2, f"{last}.markov_head.head": config.text.dspark_block_size, **dict.fromkeys(pairs, 1)}


def test_values_have_readable_names(built: tuple[ModelConfig, ir.Module]) -> None:
    config, module = built
    text = module.operation.get_asm(use_name_loc_as_prefix=True)
    layer = config.n_prefill
    assert f"%layers.{layer}.attn.heads = " in text and f"%layers.{layer}.attn.wq_a" in text and "%logits = " in text
    for function in functions(module).values():
        assert all(str(op.location) != "loc(unknown)" for op in operations(function) if op.name != "func.return")


@pytest.mark.parametrize(("options", "text"), [
    (GraphOptions(0, 256, 16), "max_sequences is 0, expected at least 1"),
    (GraphOptions(1, 256, 15), "block_tokens is 15, expected a multiple of the compression ratio 2"),
    (GraphOptions(1, 4097, 16), "max_context is 4097, expected at most the model's 4096 positions"),
    (GraphOptions(-1, 5000, 1), "max_sequences is -1, expected at least 1; "
                                "block_tokens is 1, expected a multiple of the compression ratio 2; "
                                "max_context is 5000, expected at most the model's 4096 positions"),
])
def test_options_that_fit_no_graph_are_refused(options: GraphOptions, text: str) -> None:
    with ir.Context(), pytest.raises(GraphError) as refused:
        build_graph(shipped_config("tiny"), options)
    assert str(refused.value) == f"no graph can be built - GraphOptions - {text} - correct these options"
