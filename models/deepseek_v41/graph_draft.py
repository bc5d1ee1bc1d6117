"""DSpark as ops: features of the main model and the stages' windows in @decoder, a drafted block in @draft (docs/model.md 7).

The rows of a drafted block see each other and the stage's window; their own window vectors are staged and never committed.
"""

from collections.abc import Sequence

from tapeout.dialects import dspark, mhc, nn, sample
from tapeout.dialects._mlir import ir
from tapeout.dialects.format import FP32, INT32, REAL, Number
from tapeout.dialects.types import Tensor
from tapeout.models.deepseek_v41.config import ModelConfig
from tapeout.models.deepseek_v41.graph_function import Function
from tapeout.models.deepseek_v41.graph_layers import Engine, Layer, Rows, Streams, block, window_entries

DRAFT_STREAM = 1  # of the keyed draw; the target's is 0. Token n of a block is drawn from stream 1 + n at the position before the block
ROWS = None


def stage_layer(f: Function, config: ModelConfig, engine: Engine, stage: int, positions: ir.Value) -> Layer:
    return Layer(f, config, engine, f"mtp.{stage}", config.layers + stage, positions)


def features(f: Function, taps: Sequence[ir.Value]) -> ir.Value:
    """The stream means [?, H] entering the target layers, side by side."""
    return nn.concat(list(taps), loc=f.at("features"))


def tap(f: Function, streams: Streams) -> ir.Value:
    return mhc.mean(streams.x, loc=f.at("tap"))


def write_windows(f: Function, config: ModelConfig, engine: Engine, found: ir.Value, positions: ir.Value, commits: ir.Value) -> None:
    """Appends the features [?, T*H] of main tokens to the window of every stage (docs/model.md 7.1)."""
    first = stage_layer(f, config, engine, 0, positions)
    shared = first.norm("main_features", first.linear("main_low", found, "main_proj"), "main_norm")
    for stage in range(config.draft_stages):
        layer = stage_layer(f, config, engine, stage, positions)
        with f.layer(f"draft.{stage}"):
            layer.stage("attn.window", window_entries(layer, shared))
            layer.commit("attn.window", commits)


def write_draft(f: Function, config: ModelConfig, engine: Engine) -> None:
    """@draft: tokens and confidence logits [?sequences, B] behind the token that the backbone sampled last (docs/model.md 7.2)."""
    text = config.text
    sampled = f.input("sampled", Tensor((ROWS,), INT32), "outputs")
    per_sequence = {name: f.input(name, Tensor((ROWS,), number), "sequences") for name, number in _INPUTS.items()}
    golden = nn.take(sampled, per_sequence["golden_rows"], loc=f.at("golden"))
    last, slots = per_sequence["draft_positions"], per_sequence["draft_slots"]
    tokens, positions, row_slots = dspark.block(
        golden, last, slots, noise=text.dspark_noise_token_id, size=text.dspark_block_size, loc=f.at("block"))
    window = dspark.window(last, slots, window=text.sliding_window, ring=config.ring_tokens, sequences=engine.sequences,
                           size=text.dspark_block_size, loc=f.at("window"))
    rows = Rows(positions, row_slots, *window)
    embedded = nn.embed(tokens, f.weight("embed"), out=REAL, loc=f.at("embedded"))
    streams = Streams(*mhc.start(embedded, streams=text.hc_mult, loc=f.at("start")))
    for stage in range(config.draft_stages):
        with f.layer(f"draft.{stage}"):
            streams = block(stage_layer(f, config, engine, stage, positions), streams, rows)
    hidden = mhc.collapse(streams.x, streams.premix, loc=f.at("hidden"))
    _write_tokens(f, config, hidden, golden, per_sequence)


def _write_tokens(f: Function, config: ModelConfig, hidden: ir.Value, golden: ir.Value, per_sequence: dict[str, ir.Value]) -> None:
    """The sequential part: each token corrects the logits of the next by the Markov head."""
    text, last = config.text, f"mtp.{config.draft_stages - 1}"
    normed = nn.rms_norm(hidden, f.weight(f"{last}.norm"), epsilon=text.rms_norm_eps, loc=f.at("normed"))
    base = nn.linear(normed, f.weight("head"), groups=1, wide=True, loc=f.at("base"))
    markov = f.weight(f"{last}.markov_head.embed"), f.weight(f"{last}.markov_head.head")
    settings = [per_sequence[f"draft_{name}"] for name in ("temperature", "top_k", "top_p", "seeds")]
    previous, tokens, embedded = golden, [], []
    for n in range(text.dspark_block_size):
        place = {"step": n, "size": text.dspark_block_size}
        embedded.append(nn.embed(previous, markov[0], out=REAL, loc=f.at(f"markov_{n}")))
        bias = nn.linear(embedded[n], markov[1], groups=1, wide=True, loc=f.at(f"bias_{n}"))
        logits = dspark.correct(base, bias, **place, loc=f.at(f"logits_{n}"))
        previous, _ = sample.draw(logits, *settings, per_sequence["draft_positions"], stream=DRAFT_STREAM + n, loc=f.at(f"draft_{n}"))
        tokens.append(previous)
    confidences = dspark.confidence(hidden, embedded, f.weight(f"{last}.confidence_head.proj"), loc=f.at("confidences"))
    f.finish({"drafts": nn.stack(tokens, loc=f.at("drafts")), "confidences": confidences})


_INPUTS = {"golden_rows": INT32, "draft_positions": INT32, "draft_slots": INT32, "draft_temperature": FP32, "draft_top_k": INT32,
           "draft_top_p": FP32, "draft_seeds": Number("i64")}
