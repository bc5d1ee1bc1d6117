"""The graph of the text model: module `@tapeout` with @step, @encoder, @decoder, @sample and @draft on ragged rows (docs/model.md).

It is the real-number model: activations and state entries are f64, weights have their storage numbers, nothing is rounded; the pass
assign-formats gives numbers later. Values between functions have one name on both sides. Layers are written in graph_layers.py, the draft
in graph_draft.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tapeout.dialects import cache, engram, mhc, nn, sample, step
from tapeout.dialects._mlir import ir
from tapeout.dialects.define import load_dialects
from tapeout.dialects.format import FP32, INT32, REAL, Number
from tapeout.dialects.types import Tensor
from tapeout.models.deepseek_v41.config import LayerKind, ModelConfig
from tapeout.models.deepseek_v41.graph_draft import features, tap, write_draft, write_windows
from tapeout.models.deepseek_v41.graph_function import Function, Operands
from tapeout.models.deepseek_v41.graph_layers import (
    Engine,
    EntryRows,
    Layer,
    Rows,
    Streams,
    append_entries,
    block,
    engram_rows,
    sublayer_input,
    with_engram,
)
from tapeout.models.deepseek_v41.graph_states import HISTORY, LAST, history_ring, state_sources
from tapeout.models.deepseek_v41.weights import TOKEN_MAP, WeightSource, weight_sources

__all__ = ["GraphError", "GraphOptions", "WeightSource", "build_graph", "weight_sources"]

ROWS = None
TABLE = Tensor((ROWS,), INT32)
TARGET_STREAM = 0


class GraphError(ValueError):
    """Options that no graph can be built for."""


@dataclass(frozen=True)
class GraphOptions:
    """What a graph is built for: sequence slots, tokens of the longest sequence, tokens of a cache block."""

    max_sequences: int
    max_context: int
    block_tokens: int = 128

    @property
    def max_blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.max_context // self.block_tokens)


def build_graph(config: ModelConfig, options: GraphOptions) -> ir.Module:
    """The module of the text model. Needs a current context (`with ir.Context():`), into which it loads the dialects.

    Raises `GraphError` with every option that does not fit. The module is verified.
    """
    _check(config, options)
    load_dialects(ir.Context.current)
    with ir.Location.name("tapeout"):
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get("tapeout")
        # A drafted block may reach past the longest context by its own length.
        weights = weight_sources(config, options.max_context + config.text.dspark_block_size)
        graph = _Graph(module, config, options, Operands(weights, state_sources(config)))
        graph.step()
        graph.encoder()
        graph.decoder()
        graph.sample()
        graph.draft()
    module.operation.verify()
    return module


def _check(config: ModelConfig, options: GraphOptions) -> None:
    longest = config.text.max_position_embeddings
    problems = [f"{name} is {value}, expected at least 1" for name, value in vars(options).items() if value < 1]
    ratios = sorted({config.ratio(l) for l in range(config.layers)} - {0})
    problems += [f"block_tokens is {options.block_tokens}, expected a multiple of the compression ratio {ratio}"
                 for ratio in ratios if options.block_tokens % ratio]
    if options.max_context > longest:
        problems.append(f"max_context is {options.max_context}, expected at most the model's {longest} positions")
    if problems:
        raise GraphError(f"no graph can be built - GraphOptions - {'; '.join(problems)} - correct these options")


@dataclass(frozen=True)
class _Graph:
    """What every function of the module is written from."""

    module: ir.Module
    config: ModelConfig
    options: GraphOptions
    operands: Operands

    @property
    def engine(self) -> Engine:
        return Engine(self.options.max_sequences, self.options.block_tokens)

    def function(self, name: str) -> Function:
        return Function(self.module, name, self.operands)

    # -- @step

    def step(self) -> None:
        """Row tables that encoder layers share, from what the host says about the rows; the token history moves on."""
        with self.function("step").writing() as f:
            rows = {name: f.input(name, TABLE, "rows") for name in ("tokens", "positions", "slots", "starts", "ends", "floors")}
            block_table = self.block_table(f)
            patched = step.patch(rows["tokens"], rows["slots"], f.state(LAST), loc=f.at("patched"))
            f.finish({"patched": patched, **self.window_tables(f, rows), **self.entry_tables(f, rows, block_table),
                      **self.engram_tables(f, rows, patched)})

    def window_tables(self, f: Function, rows: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Ring rows that each row sees, their number, and where its own window vector is kept."""
        ring = self.config.ring_tokens
        ids, counts = step.window(*(rows[n] for n in ("positions", "slots", "starts", "floors")), window=self.config.text.sliding_window,
                                  ring=ring, sequences=self.options.max_sequences, loc=f.at("window"))
        commits = step.commits(rows["positions"], rows["slots"], rows["ends"], ring=ring, loc=f.at("window_commits"))
        return {"window_ids": ids, "window_counts": counts, "window_commits": commits}

    def entry_tables(self, f: Function, rows: Mapping[str, ir.Value], block_table: ir.Value) -> dict[str, ir.Value]:
        """Where completed entries go, by ratio; for ratio 2 also the partner's and the row's own place in the compressor rings."""
        positions, slots, ring = rows["positions"], rows["slots"], self.config.compressor_ring
        tables = {}
        for ratio in self.entry_ratios():
            tables[f"entry_rows_{ratio}"] = step.entries(
                positions, slots, block_table, ratio=ratio, block_tokens=self.options.block_tokens, loc=f.at(f"entry_rows_{ratio}"))
        if 2 in self.entry_ratios():
            tables["partners"] = step.partners(
                positions, slots, rows["starts"], ring=ring, sequences=self.options.max_sequences, loc=f.at("partners"))
            tables["compressor_commits"] = step.commits(positions, slots, rows["ends"], ring=ring, loc=f.at("compressor_commits"))
        return tables

    def engram_tables(self, f: Function, rows: Mapping[str, ir.Value], patched: ir.Value) -> dict[str, ir.Value]:
        """Table rows of every Engram layer, hashed from the newest token and those before it (docs/model.md 6.1, 6.2)."""
        text, sequences, history = self.config.text, self.options.max_sequences, f.state(HISTORY)
        length = history_ring(self.config)
        compressed = engram.compress(patched, f.weight(TOKEN_MAP), loc=f.at("compressed"))
        cache.stage(history, compressed, length=length, sequences=sequences, loc=f.at("history.stage"))
        lookback = engram.lookback(history, rows["positions"], rows["slots"], rows["starts"], depth=text.engram_max_ngram_size,
                                   pad=text.engram_pad_token_id, length=length, sequences=sequences, loc=f.at("lookback"))
        commits = step.commits(rows["positions"], rows["slots"], rows["ends"], ring=length, loc=f.at("history_commits"))
        cache.commit(history, commits, length=length, sequences=sequences, loc=f.at("history.commit"))
        return {_engram_rows(t.layer): engram.hash(
            lookback, multipliers=list(t.multipliers), primes=[p for order in t.primes for p in order], heads=text.engram_n_heads,
            loc=f.at(_engram_rows(t.layer))) for t in self.config.engram_tables}

    def entry_ratios(self) -> list[int]:
        """Ratios of the layers that own entries, ascending."""
        return sorted({self.config.ratio(l) for l in range(self.config.layers) if self.config.layer_kind(l) is LayerKind.FULL})

    def block_table(self, f: Function) -> ir.Value:
        return f.input("block_table", Tensor((self.options.max_sequences, self.options.max_blocks), INT32))

    # -- @encoder

    def encoder(self) -> None:
        """Embedding, the layers before the boundary, and the boundary layer's input, entries and index keys."""
        config, boundary = self.config, self.config.n_prefill
        with self.function("encoder").writing() as f:
            patched = f.input("patched", TABLE, "rows")
            rows, entry_rows = self.encoder_rows(f)
            embedded = nn.embed(patched, f.weight("embed"), out=REAL, loc=f.at("embedded"))
            streams, taps = Streams(*mhc.start(embedded, streams=config.text.hc_mult, loc=f.at("start"))), []
            ahead = self.looked_up(f, 0, rows)
            for l in range(boundary):
                layer, looked_up, ahead = self.layer(f, l, rows), ahead, self.looked_up(f, l + 1, rows)
                with f.layer(layer.name):
                    if looked_up is not None:
                        streams = with_engram(layer, streams, looked_up)
                    taps += self.taps(f, l, streams)
                    streams = block(layer, streams, rows, entry_rows)
            layer = self.layer(f, boundary, rows)
            with f.layer(layer.name):
                x = sublayer_input(layer, "attn", streams)
                append_entries(layer, x, entry_rows)
            found = {"features": features(f, taps)} if taps else {}
            f.finish({"streams": streams.x, "premix": streams.premix, "boundary_input": x, **found})

    def looked_up(self, f: Function, l: int, rows: Rows) -> ir.Value | None:
        """Table rows of an Engram layer, None for another. They come from afar: a layer asks for those of the next one."""
        table = self.config.engram_table(l)
        if table is None:
            return None
        return engram_rows(self.layer(f, l, rows), f.input(_engram_rows(l), Tensor((ROWS, table.columns), INT32), "rows"))

    def encoder_rows(self, f: Function) -> tuple[Rows, EntryRows]:
        """The row tables that @step made, as inputs."""
        config, wanted = self.config, ["positions", "slots", "window_counts", "window_commits"]
        tables = {name: f.input(name, TABLE, "rows") for name in wanted}
        ids = f.input("window_ids", Tensor((ROWS, config.text.sliding_window), INT32), "rows")
        entries = {ratio: f.input(f"entry_rows_{ratio}", TABLE, "rows") for ratio in self.entry_ratios()}
        pairs = [f.input(name, TABLE, "rows") if 2 in entries else None for name in ("partners", "compressor_commits")]
        rows = Rows(tables["positions"], tables["slots"], ids, tables["window_counts"], tables["window_commits"], self.block_table(f))
        return rows, EntryRows(entries, pairs[0], pairs[1])

    def layer(self, f: Function, l: int, rows: Rows) -> Layer:
        return Layer(f, self.config, self.engine, f"layers.{l}", l, rows.positions)

    def taps(self, f: Function, l: int, streams: Streams) -> list[ir.Value]:
        """The stream mean that the draft sees of layer `l`, if it is one of its targets."""
        return [tap(f, streams)] if l in self.config.text.dspark_target_layer_ids else []

    # -- @decoder

    def decoder(self) -> None:
        """The layers from the boundary on for the kept rows, the draft's windows, and logits of the rows that ask for them."""
        config, boundary = self.config, self.config.n_prefill
        with self.function("decoder").writing() as f:
            given = self.handed_down(f)
            kept = f.input("kept", TABLE, "kept")
            outputs = f.input("outputs", TABLE, "outputs")
            rows = self.kept_rows(f, kept)
            here = {name: nn.take(value, kept, loc=f.at(f"kept_{name}")) for name, value in given.items()}
            streams, taps = Streams(here["streams"], here["premix"]), []
            for l in range(boundary, config.layers):
                layer = self.layer(f, l, rows)
                with f.layer(layer.name):
                    taps += self.taps(f, l, streams)
                    streams = block(layer, streams, rows, x=here["boundary_input"] if l == boundary else None)
            found = here["features"] if "features" in here else features(f, taps)
            assert rows.window_commits is not None
            write_windows(f, config, self.engine, found, rows.positions, rows.window_commits)
            f.finish({"logits": self.logits(f, streams, outputs)})

    def handed_down(self, f: Function) -> dict[str, ir.Value]:
        """What @encoder hands over, for all rows."""
        text = self.config.text
        given = {
            "streams": f.input("streams", Tensor((ROWS, text.hc_mult, text.hidden_size), REAL), "rows", "bf16"),
            "premix": f.input("premix", Tensor((ROWS, text.hc_mult), REAL), "rows", "f32"),
            "boundary_input": f.input("boundary_input", Tensor((ROWS, text.hidden_size), REAL), "rows", "bf16"),
        }
        targets = text.dspark_target_layer_ids
        if targets[0] < self.config.n_prefill:
            given["features"] = f.input("features", Tensor((ROWS, len(targets) * text.hidden_size), REAL), "rows", "bf16")
        return given

    def kept_rows(self, f: Function, kept: ir.Value) -> Rows:
        """The decoder's own row tables: its rows, and so its windows, are the kept ones."""
        tables = {name: nn.take(f.input(name, TABLE, "rows"), kept, loc=f.at(f"kept_{name}")) for name in ("positions", "slots")}
        tables |= {name: f.input(f"kept_{name}", TABLE, "kept") for name in ("starts", "ends", "floors")}
        window = self.window_tables(f, tables)
        return Rows(tables["positions"], tables["slots"], window["window_ids"], window["window_counts"], window["window_commits"],
                    self.block_table(f))

    def logits(self, f: Function, streams: Streams, outputs: ir.Value) -> ir.Value:
        """Next-token logits [?outputs, V] of rows `outputs` (docs/model.md 8.1)."""
        x, premix = (nn.take(v, outputs, loc=f.at("output_streams")) for v in (streams.x, streams.premix))
        hidden = mhc.collapse(x, premix, loc=f.at("hidden"))
        normed = nn.rms_norm(hidden, f.weight("norm"), epsilon=self.config.text.rms_norm_eps, loc=f.at("normed"))
        return nn.linear(normed, f.weight("head"), groups=1, wide=True, loc=f.at("logits"))

    # -- @sample and @draft

    def sample(self) -> None:
        """A token and its log-probability for every row of logits; the slot remembers its token (docs/model.md 8.2)."""
        with self.function("sample").writing() as f:
            logits = f.input("logits", Tensor((ROWS, self.config.text.vocab_size), REAL), "outputs", "f32")
            numbers = {"temperature": FP32, "top_k": INT32, "top_p": FP32, "seeds": Number("i64"), "sample_slots": INT32,
                       "sample_positions": INT32}
            given = {name: f.input(name, Tensor((ROWS,), number), "outputs") for name, number in numbers.items()}
            slots = given.pop("sample_slots")
            tokens, logprobs = sample.draw(logits, *given.values(), stream=TARGET_STREAM, loc=f.at("sampled"))
            step.remember(f.state(LAST), slots, tokens)
            f.finish({"sampled": tokens, "logprobs": logprobs})

    def draft(self) -> None:
        """A block of guessed tokens for every sequence (docs/model.md 7.2)."""
        with self.function("draft").writing() as f:
            write_draft(f, self.config, self.engine)


def _engram_rows(layer: int) -> str:
    return f"engram_rows_{layer}"
