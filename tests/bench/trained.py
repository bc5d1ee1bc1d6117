"""How good the trained checkpoint is, through its compiled programs: `python -m tests.bench.trained [WEIGHTS]`.

Prints bits per byte on held-out text beside gzip and a five-gram model, what quantization costs, what bounded replay changes, how many
drafts are accepted and what their confidences are worth. `make bench` measures a quarter of the held-out documents, drafts behind all;
`--all` measures all of them, as the model card does, and `--store FILE --as NAME` keeps the figures. Needs the Python that has the
corpus, or `--corpus PACK`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import ModelConfig, load_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.models.deepseek_v41.tensors import Dtype, scale_name, tensor_table
from tapeout.models.deepseek_v41.token_map import load_token_map
from tapeout.models.deepseek_v41.tokenizer import Tokenizer, load_tokenizer
from tapeout.models.tiny.baselines import count_five_grams, gzip_bits
from tapeout.models.tiny.corpus import Corpus, CorpusError, read_corpus
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device import open_device
from tests.bench.greedy import load_programs
from tests.bench.quality import Compiled, Divergence, Drafting, code_length, divergence, drafting, windows

SHIPPED = Path(__file__).parents[2] / "models/tiny/trained"
FIGURES = "figures.json"
ROWS = 1024  # of a window; windows do not overlap
EVERY = 4  # documents between those that `make bench` measures
EXACT_ROWS = 256  # of one document, for the comparison with arithmetic that rounds nothing
MARGIN = 12  # tokens kept beyond the window, as the released model's 140 beyond 128
CUTS, BEHIND = (192, 640), 64  # prompt lengths at which replay is tried, and rows looked at behind each
PROMPTS, MADE = (64, 192, 448), 128  # lengths of the drafting prompts in turn, and tokens made behind each
SLOTS = 64


@dataclass(frozen=True)
class Precision:
    """Bits per byte over the first rows of each document: compiled, and with no rounding of activations; `master`: nor of weights."""

    tokens: int
    stored: float
    exact: float
    master: float | None


@dataclass(frozen=True)
class Measured:
    """All figures of one checkpoint; bits are per UTF-8 byte."""

    documents: int
    size_bytes: int
    tokens: int
    gzip_apart: float
    gzip_together: float
    five_grams: float
    model: float
    precision: Precision
    keep: int
    replay: Divergence
    drafts: Drafting | None
    """None where draft stages were not trained."""

    @property
    def lines(self) -> Iterator[str]:
        """What the command prints."""
        best = min(self.gzip_apart, self.gzip_together, self.five_grams)
        p, r, d = self.precision, self.replay, self.drafts
        yield f"held out, {self.documents} documents, {self.size_bytes:,} bytes, {self.tokens:,} tokens; bits per byte:"
        yield f"  gzip -9 {self.gzip_apart:.3f} each, {self.gzip_together:.3f} as one stream; five-gram bytes {self.five_grams:.3f}"
        yield f"  compiled model {self.model:.3f}, {1 - self.model / best:.1%} below the better of these (bound 25 %)"
        yield (f"first {EXACT_ROWS} rows of each, {p.tokens:,} tokens: compiled {p.stored:.4f}, no activation rounded {p.exact:.4f} "
               f"({p.stored / p.exact - 1:+.2%})")  # fmt: skip
        if p.master is not None:
            yield f"  nor weights {p.master:.4f} ({p.stored / p.master - 1:+.2%}, bound 2 %)"
        yield (f"bounded replay, keep {self.keep}, {r.rows:,} rows: KL {r.kl:.5f} nats (bound 0.01), "
               f"loss {r.exact_loss:.4f} to {r.replayed_loss:.4f} ({r.loss_change:+.3%}, bound 0.5 %)")  # fmt: skip
        if d is None:
            return
        yield f"drafts: {d.mean_accepted:.2f} of {len(d.reached)} accepted in {d.blocks:,} blocks (bound 2.0, bonus not counted)"
        for n, row in enumerate(zip(d.reached, d.accepted_share, d.claimed, d.calibration_error, strict=True), 1):
            yield "  position {}: {:,} reached, {:.3f} accepted, {:.3f} claimed, calibration error {:.3f} (bound 0.05)".format(n, *row)


class Judge:
    """One checkpoint, compiled for this CPU, and the documents it is judged on."""

    def __init__(self, weights: Path, artifact: Path, corpus: Corpus, every: int, workers: int) -> None:
        self.config, self.weights = load_config(weights), weights
        compile_path(weights, artifact, Settings(max_rows=ROWS, max_outputs=ROWS, max_sequences=SLOTS, max_context=ROWS + MADE))
        loaded = load_artifact(artifact)
        self.compiled = Compiled(load_programs(loaded, weights, open_device(loaded, workers)))
        self.tokenizer: Tokenizer = load_tokenizer(weights, self.config)
        self.corpus, self.documents = corpus, corpus.held_out[::every]
        self.ids = [self.tokenizer.encode(document.text, add_bos=False) for document in self.documents]

    def measured(self, master: Path | None, drafts: bool) -> Measured:
        texts = [document.utf8 for document in self.documents]
        size = sum(map(len, texts))
        zipped, grams = gzip_bits(texts), count_five_grams([document.utf8 for document in self.corpus.train])
        cut = [window for ids in self.ids for window in windows(ids, self.config.bos_token_id, ROWS, ROWS)]
        return Measured(
            len(texts), size, sum(map(len, self.ids)), zipped.apart / size, zipped.together / size, sum(map(grams.bits, texts)) / size,
            code_length(self.compiled.logits, cut) / size, self.precision(master), self.keep, self.replay(), self.drafts() if drafts else None,
        )  # fmt: skip

    def precision(self, master: Path | None) -> Precision:
        firsts = [next(windows(ids, self.config.bos_token_id, EXACT_ROWS, EXACT_ROWS)) for ids in self.ids if ids]
        followed = [window.following for window in firsts]
        size = sum(len(self.tokenizer.token_bytes[token]) for following in followed for token in following)
        bits = [code_length(forward, firsts) / size for forward in (self.compiled.logits, self._exact(self._stored()))]
        full = None if master is None else code_length(self._exact(_master(self.config, master)), firsts) / size
        return Precision(sum(map(len, followed)), bits[0], bits[1], full)

    @property
    def keep(self) -> int:
        return self.config.text.sliding_window + MARGIN

    def replay(self) -> Divergence:
        """Every cut of every document that is long enough."""
        exact, replayed, following = [], [], []
        for ids in self.ids:
            text = [self.config.bos_token_id, *ids]
            cuts = [cut for cut in CUTS if cut + BEHIND < len(text)]
            if cuts:
                whole = self.compiled.logits(text[: cuts[-1] + BEHIND - 1])
            for cut in cuts:
                rows = slice(cut - 1, cut + BEHIND - 1)
                exact.append(whole[rows])
                replayed.append(self.compiled.logits(text[: rows.stop], first=rows.start, keep_from=cut - self.keep))
                following.append(text[rows.start + 1 : rows.stop + 1])
        return divergence(exact, replayed, following)

    def drafts(self) -> Drafting:
        """Greedy continuations behind all held-out documents, as calibration needs many, a slot each at a time; a text ends at EOS."""
        every = [self.tokenizer.encode(document.text, add_bos=False) for document in self.corpus.held_out]
        asked = [[self.config.bos_token_id, *ids[: PROMPTS[i % len(PROMPTS)] - 1]] for i, ids in enumerate(every)]
        asked = [prompt for i, prompt in enumerate(asked) if len(prompt) == PROMPTS[i % len(PROMPTS)]]
        texts, drafts, confidences = [], [], []
        for first in range(0, len(asked), SLOTS):
            for made, *told in zip(*self.compiled.greedy(asked[first : first + SLOTS], MADE), strict=True):
                end = made.index(self.config.eos_token_id) + 1 if self.config.eos_token_id in made else len(made)
                texts.append(made[:end])
                drafts.append(told[0][:end])
                confidences.append(told[1][:end])
        return drafting(texts, drafts, confidences)

    def _stored(self) -> dict[str, Any]:
        checkpoint = open_checkpoint(self.weights, self.config)
        return {name: checkpoint.tensor(name) for name in checkpoint.tensors}

    def _exact(self, tensors: dict[str, Any]) -> Any:
        reference = Reference(self.config, tensors, token_map=load_token_map(self.weights, self.config, self.tokenizer), numerics="exact")
        return lambda tokens: reference.forward(reference.start(), tokens).logits


def _master(config: ModelConfig, path: Path) -> dict[str, Any]:
    """Weights before they were rounded, as the reference takes them: Engram rows with scales of 1."""
    with np.load(path) as file:
        found: dict[str, Any] = {name: file[name] for name in file.files}
    table = tensor_table(config)
    ones = {scale_name(name): np.full(table[scale_name(name)].shape, 127, np.uint8) for name in found if table[name].dtype is Dtype.F8_E4M3}
    return found | ones


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights", nargs="?", type=Path, default=SHIPPED)
    parser.add_argument("--all", action="store_true", help="all held-out documents, not every fourth")
    parser.add_argument("--corpus", type=Path, help="a pack; by default this Python's library")
    parser.add_argument("--master", type=Path, help="float32 weights before rounding, an .npz file")
    parser.add_argument("--no-drafts", action="store_true", help="the draft stages are not trained")
    parser.add_argument("--workers", type=int, default=1, help="threads; more than idle processors are slower")
    parser.add_argument("--store", type=Path, help="a JSON file that keeps the figures")
    parser.add_argument("--as", dest="name", default="trained", help="the name they are kept under")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The command; returns 0, or 1 with a refusal on stderr."""
    asked = _arguments(given)
    try:
        corpus = read_corpus(asked.corpus)
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, stored in kept(asked.weights / FIGURES).items():
        print(f"stored figures of {name}, all held-out documents:\n  " + "\n  ".join(stored.lines))
    print(f"{asked.weights}, {'all' if asked.all else f'every {EVERY}th'} of the held-out documents, now:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(asked.weights, Path(folder, "artifact"), corpus, 1 if asked.all else EVERY, asked.workers)
        measured = judge.measured(asked.master, not asked.no_drafts)
    print("\n".join(measured.lines), flush=True)
    if asked.store is not None:
        _store(asked.store, asked.name, measured)
    return 0


def _store(path: Path, name: str, measured: Measured) -> None:
    figures = {key: _document(value) for key, value in kept(path).items()} | {name: _document(measured)}
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def _document(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured), "replay": measured.replay._asdict(), "drafts": measured.drafts._asdict() if measured.drafts else None}


def kept(path: Path) -> dict[str, Measured]:
    """Figures that were stored, by name; none where there is no such file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: _measured(figures) for name, figures in found.items()}


def _measured(figures: dict[str, Any]) -> Measured:
    drafts = Drafting(**figures["drafts"]) if figures["drafts"] else None
    parts = {"precision": Precision(**figures["precision"]), "replay": Divergence(**figures["replay"]), "drafts": drafts}
    return Measured(**{**figures, **parts})



if __name__ == "__main__":
    sys.exit(main())
