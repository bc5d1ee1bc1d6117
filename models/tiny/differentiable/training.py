"""A training run: backbone steps, then draft steps, with what is logged and kept (docs/model.md for the model, model card for figures).

The backbone learns with all roundings from its first step on, and, where the plan says so, with bounded replay in part of its
sequences and the draft stages beside it: they read its features and its distributions and send no gradient back. At the end the
confidence head is fitted to text that the finished backbone writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import measure
from .capture import Captured
from .casts import Numerics
from .data import WrittenFile, batch_starts, read_token_file, read_written_file, replay_floors
from .draft import draft, stage_name
from .generate import Trial, Written, acceptance, fitted_confidence, trial, write
from .model import Differentiable, Output
from .objective import DraftLoss, draft_loss, next_token_loss
from .optimizer import Optimizer, Rates, balance, learns
from .speed import use_compilation
from .state import load_state, save_state
from .weights import Weights, formats_of, initial_weights, rounded

if TYPE_CHECKING:
    from tapeout.models.deepseek_v41.config import ModelConfig

Log = Callable[[dict[str, Any]], None]
_TIMED = 10  # steps
_LONGEST_PROMPT = 450  # tokens


@dataclass(frozen=True)
class Plan:
    """What a run does. Backbone steps count on over runs, so that a later run reads on where an earlier one stopped."""

    seed: int = 0
    batch: int = 64
    length: int = 512
    first_step: int = 0
    last_step: int = 0
    seconds: float = 0.0  # fits `last_step` to the device: how long the steps may take; the log says what was chosen
    warm_up: int = 200
    decay_share: float = 0.0  # of the run's steps, at its end: there the rate falls to zero
    rate: float = 1.0
    dropout: float = 0.1
    balance: float = 0.001
    replay_share: float = 0.0
    replay_slack: int = 12
    final: int = 0  # 1 rounds the weights at the end and keeps them as they are stored
    draft_anchors: int = 0  # drafting steps a sequence that the draft stages learn from
    drafts_only: int = 0  # 1 leaves the backbone as it is and trains the draft stages alone, on a pool of its outputs
    pool: int = 2048  # sequences of the corpus in that pool; those that the backbone wrote come on top
    deadline: float = 0.0  # seconds after the start by which fitted steps end, whatever `seconds` allows
    written_rows: int = 0  # sequences of a batch that the backbone wrote, from a file of such text
    written_sharpness: float = 3.0  # of the target distribution there: greedy text comes from a temperature of zero
    written_prompts: int = 96
    written_count: int = 128
    log_every: int = 50
    measure_every: int = 500
    measure_rows: int = 100_000
    deterministic: int = 1


@dataclass(frozen=True)
class _Batch:
    """Buffers that a captured step reads: tokens `[B, T + 1]`, window floors `[B, T]`, draft anchors `[B, M]`, rows of a pool `[B]`,
    share kept by dropout."""

    tokens: Tensor
    floors: Tensor
    anchors: Tensor
    rows: Tensor
    keep: Tensor

    @classmethod
    def empty(cls, plan: Plan, device: torch.device) -> _Batch:
        shapes = ((plan.batch, plan.length + 1), (plan.batch, plan.length), (plan.batch, plan.draft_anchors), (plan.batch,))
        tokens, floors, anchors, rows = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes)
        return cls(tokens, floors, anchors, rows, torch.ones((), device=device))

    def fill(self, plan: Plan, stream: Tensor, drafts: int, keep: int, number: int) -> None:
        """Fills the buffers for step `number` from the corpus."""
        starts = torch.from_numpy(batch_starts(len(stream), plan.batch, plan.length, plan.seed, number)).to(stream.device)
        self.tokens.copy_(stream[starts[:, None] + torch.arange(plan.length + 1, device=stream.device)])
        if plan.replay_share:
            self.floors.copy_(torch.from_numpy(replay_floors(plan.batch, plan.length, keep, plan.replay_share, plan.seed, number)))
        if plan.draft_anchors:
            drawn = np.random.default_rng([plan.seed, number, 2]).integers(0, plan.length - drafts, tuple(self.anchors.shape))
            self.anchors.copy_(torch.from_numpy(drawn))

    def draw(self, plan: Plan, pool: _Pool, drafts: int, number: int) -> None:
        """Fills the buffers for step `number` from a pool: its written rows come last, with anchors inside what was written."""
        draw = np.random.default_rng([plan.seed, number, 4])
        known = plan.batch - plan.written_rows
        rows = np.concatenate(
            (draw.integers(0, plan.pool, known), draw.integers(plan.pool, max(len(pool.tokens), plan.pool + 1), plan.written_rows))
        )
        anchors = draw.integers(0, plan.length - drafts, tuple(self.anchors.shape))
        anchors[known:] = draw.integers(0, max(1, pool.count - drafts), anchors[known:].shape)
        self.rows.copy_(torch.from_numpy(rows))
        self.anchors.copy_(torch.from_numpy(anchors))
        self.anchors[known:] += pool.starts[self.rows[known:] - plan.pool][:, None] - 1
        self.tokens.copy_(pool.tokens[self.rows])


@dataclass(frozen=True)
class _Pool:
    """What a backbone makes of sequences: `tokens` `[P, T + 1]`, `features` `[P, T, F]`, `logits` `[P, T, V]`.

    Behind the rows of the corpus come those it wrote itself, from `starts` on, `count` tokens each.
    """

    tokens: Tensor
    features: Tensor
    logits: Tensor
    starts: Tensor
    count: int


class Training:
    """One run on one device."""

    def __init__(
        self, config: ModelConfig, tokens: Path, plan: Plan, resume: list[Path], device: str, log: Log, written: Path | None = None
    ) -> None:
        torch.manual_seed(plan.seed + plan.first_step)
        torch.use_deterministic_algorithms(bool(plan.deterministic), warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = True  # operands that the model rounds are exact in TF32
        self.plan, self.log, self.device = plan, log, torch.device(device)
        self.bos, self.began = config.bos_token_id, time.monotonic()
        use_compilation(self.device.type == "cuda")
        file = read_token_file(tokens)
        self.train, self.held_out, self.aside, self.byte_counts = (
            torch.from_numpy(part).to(self.device) for part in (file.train, file.held_out, file.aside, file.byte_counts)
        )
        # BF16 is slow on most CPUs; float32 carries the same rounded values.
        self.numerics = Numerics.training() if self.device.type == "cuda" else Numerics.faithful()
        self.model = Differentiable(config, file.token_map, self.numerics, plan.length, self.device)
        self.formats = formats_of(config)
        start = initial_weights(config, plan.seed)
        self.about: dict[str, Any] = {}
        if resume:
            found, self.about = load_state(resume)
            start |= found
        self.weights: Weights = {name: start[name].to(self.device) for name in self.formats}
        self.written = {name: self._placed(part) for name, part in read_written_file(written).items()} if written else {}
        self._sharpness = torch.ones(plan.batch, device=self.device)
        self._sharpness[plan.batch - plan.written_rows :] = plan.written_sharpness
        self.held_out_rows = measure.sequences(self.held_out, plan.length, plan.measure_rows)

    @property
    def keep(self) -> int:
        """Rows that a replay rebuilds: the window and some slack."""
        return self.model.settings.attention.window + self.plan.replay_slack

    def run(self, folder: Path) -> dict[str, Any]:
        """Trains, measures, and writes weights to `folder`; returns the figures."""
        if self.plan.last_step > self.plan.first_step or self.plan.seconds:
            self._steps()
        if not self.plan.final:
            self._save(folder)
        full = {} if self.plan.drafts_only else {"full_precision_bits_per_byte": self._full_precision_bits()}
        if self.plan.final:
            self._settle()
            self._save(folder)
            if self.plan.draft_anchors:
                self._fit_confidence()
                self._save(folder)
        figures = full | self._figures()
        self.log({"figures": figures})
        return figures

    def _save(self, folder: Path) -> None:
        """Keeps all weights at the end, and those that have learnt on the way."""
        all_of_them = self.plan.final or self.plan.draft_anchors
        kept = {name: value for name, value in self.weights.items() if all_of_them or not name.startswith("mtp.")}
        save_state(folder, kept, {"plan": asdict(self.plan)}, exact=bool(self.plan.final))

    # -- steps

    def _steps(self) -> None:
        plan = self.plan
        batch = _Batch.empty(plan, self.device)
        batch.keep.fill_(1 - plan.dropout)
        names = [name for name in self.weights if plan.draft_anchors or not name.startswith("mtp.")]
        for name in names:
            self.weights[name].requires_grad_(learns(name))
        learning = [name for name in names if learns(name) and (not plan.drafts_only or name.startswith(("mtp.", "embed.")))]
        rates = Rates()
        optimizer = Optimizer(
            self.weights, learning, Rates(plan.rate * rates.matrices, plan.rate * rates.tables, plan.rate * rates.rest, rates.decay)
        )

        pool = self._pool() if plan.drafts_only else None

        def step() -> Tensor:
            loss, told, loads = self._loss(names, batch) if pool is None else self._pooled_loss(batch, pool)
            gradients = torch.autograd.grad(loss, [self.weights[name] for name in learning], allow_unused=True, materialize_grads=True)
            optimizer.step(dict(zip(learning, gradients, strict=True)))
            balance(self.weights, loads, plan.balance)
            return told

        captured = Captured(step, self.device)
        self._fit_steps(captured)
        for number in range(self.plan.first_step, self.plan.last_step):
            optimizer.schedule.fill_(self._schedule(number))
            if pool is None:
                batch.fill(plan, self.train, self.model.settings.drafts, self.keep, number)
            else:
                batch.draw(plan, pool, self.model.settings.drafts, number)
            told = captured()
            self._report(number + 1, told)

    def _loss(self, names: list[str], batch: _Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of one batch, what the log tells of it, and the loads of all gates."""
        plan = self.plan
        tokens = batch.tokens
        weights = rounded({name: self.weights[name] for name in names}, self.formats, self.numerics)
        floors = batch.floors if plan.replay_share else None
        output = self.model.forward(weights, tokens[:, :-1], floors=floors, keep=batch.keep)
        entropy, pull = next_token_loss(output.logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss, told, loads = entropy + pull + output.index_loss, [entropy[None], output.index_loss[None]], output.loads
        if plan.draft_anchors:
            drafted, draft_loads = self._draft_loss(weights, output, tokens, batch)
            loss, loads = loss + drafted.total, loads | draft_loads
            told += [drafted.total[None], drafted.agreement]
        return loss, torch.cat(told).detach(), loads

    def _pooled_loss(self, batch: _Batch, pool: _Pool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `_loss`, of the draft stages alone: of the backbone, the noise row of the embedding is all that still learns."""
        names = [name for name in self.weights if name.startswith(("mtp.", "embed.", "head."))]
        weights = rounded({name: self.weights[name] for name in names}, self.formats, self.numerics)
        none = torch.zeros((), device=self.device)
        output = Output(pool.logits[batch.rows], pool.features[batch.rows], none, {})
        drafted, loads = self._draft_loss(weights, output, batch.tokens, batch)
        return drafted.total, torch.cat((none[None], none[None], drafted.total[None], drafted.agreement)).detach(), loads

    @torch.no_grad()
    def _pool(self) -> _Pool:
        plan = self.plan
        starts = torch.from_numpy(batch_starts(len(self.train), plan.pool, plan.length, plan.seed, 0)).to(self.device)
        tokens = self.train[starts[:, None] + torch.arange(plan.length + 1, device=self.device)]
        written = self.written.get("train") or Written(tokens[:0], starts[:0], 0)
        tokens = torch.cat((tokens, written.tokens[:, : plan.length + 1]))
        weights = self._rounded()
        use_compilation(False)  # once a sequence
        outputs = [self.model.forward(weights, part[:, :-1]) for part in tokens.split(plan.batch)]
        use_compilation(self.device.type == "cuda")
        features, logits = (torch.cat([getattr(output, part) for output in outputs]) for part in ("features", "logits"))
        self.log({"pool": len(tokens), "written": len(written.tokens) * written.count})
        return _Pool(tokens, features, logits, written.start, written.count)

    def _draft_loss(self, weights: Weights, output: Output, tokens: Tensor, batch: _Batch) -> tuple[DraftLoss, dict[str, Tensor]]:
        count, anchors = self.model.settings.drafts, batch.anchors
        rows = (anchors[:, :, None] + 1 + torch.arange(count, device=self.device)).flatten(1)
        targets = output.logits.detach().gather(1, rows[:, :, None].expand(-1, -1, output.logits.shape[2]))
        following = tokens.gather(1, rows + 1).unflatten(1, (-1, count))
        floors = batch.floors.gather(1, anchors) if self.plan.replay_share else None
        golden = tokens.gather(1, anchors + 1)
        drafts = draft(self.model, weights, output.features, anchors, golden, following[:, :, :-1], floors=floors, keep=batch.keep)
        targets = targets * self._sharpness[:, None, None]
        losses = draft_loss(drafts, targets.unflatten(1, (-1, count)).flatten(0, 1), following.flatten(0, 1))
        return losses, drafts.loads

    def _schedule(self, step: int) -> float:
        plan = self.plan
        warm = (step - plan.first_step + 1) / plan.warm_up
        falling = plan.decay_share * (plan.last_step - plan.first_step)
        return min(1.0, warm, (plan.last_step - step) / falling if falling else 1.0)

    def _fit_steps(self, captured: Captured[Tensor]) -> None:
        """Calls the step at rate zero, as often in every run, to learn how long it takes."""
        started = time.monotonic()
        told = [captured() for _ in range(_TIMED if self.device.type == "cuda" else 0)]
        float(torch.stack(told)[0, 0]) if told else 0.0
        took = (time.monotonic() - started) / max(len(told), 1)
        if left := self.plan.seconds:
            left = min(left, self.plan.deadline - (time.monotonic() - self.began)) if self.plan.deadline else left
            self.plan = replace(self.plan, last_step=self.plan.first_step + int(left / took), seconds=0.0)
        self.log({"milliseconds_a_step": round(1e3 * took, 2), "last_step": self.plan.last_step, "memory": self._memory()})

    def _report(self, step: int, told: Tensor) -> None:
        if step % self.plan.log_every == 0:
            loss, index_loss, *drafts = (round(value, 4) for value in told.tolist())
            backbone = {} if self.plan.drafts_only else {"loss": loss, "index_loss": index_loss}
            self.log({"step": step} | backbone | ({"draft_loss": drafts[0], "agreement": drafts[1:]} if drafts else {}))
        if step % self.plan.measure_every == 0 and not self.plan.drafts_only:
            self.log({"step": step, "held_out_bits_per_byte": self._bits(self._rounded())})

    # -- what the backbone writes

    def greedy_texts(self) -> dict[str, WrittenFile]:
        """Greedy text behind prompts of every split, to be kept for a later run with `written_rows`."""
        streams = {"train": self.train, "aside": self.aside, "held_out": self.held_out}
        texts = {}
        for number, (name, stream) in enumerate(streams.items()):
            found = self._written(stream, self.plan.written_prompts, self.plan.seed + number)
            texts[name] = WrittenFile(found.tokens.cpu().numpy(), found.start.cpu().numpy(), found.count)
        return texts

    def _placed(self, part: WrittenFile) -> Written:
        tokens = np.pad(part.tokens, ((0, 0), (0, max(0, self.plan.length + 1 - part.tokens.shape[1]))))
        return Written(torch.from_numpy(tokens).to(self.device), torch.from_numpy(part.starts).to(self.device), part.count)

    def _written(self, stream: Tensor, prompts: int, seed: int) -> Written:
        """Greedy continuations of pieces of a stream, behind prompts of many lengths, half of them from the start of a document."""
        plan = self.plan
        draw = np.random.default_rng([seed, 3])
        prompts = -(-prompts // plan.batch) * plan.batch
        starts = torch.from_numpy(draw.integers(0, len(stream) - plan.length - 1, prompts)).to(self.device)
        begins = (stream[: -plan.length - 1] == self.bos).nonzero()[:, 0]
        if len(begins):
            starts[::2] = begins[torch.from_numpy(draw.integers(0, len(begins), len(starts[::2]))).to(self.device)]
        rows = stream[starts[:, None] + torch.arange(plan.length + 1, device=self.device)]
        longest = min(_LONGEST_PROMPT, plan.length - plan.written_count)
        cursors = torch.from_numpy(draw.integers(min(32, longest // 2), longest, prompts)).to(self.device)
        return write(self._logits_as_trained(), rows, cursors, plan.written_count, plan.batch)

    def _logits_as_trained(self) -> Callable[[Tensor], Tensor]:
        """The backbone as steps run it: with gradients that nobody asks for, and so without compiling all formulas once more."""
        plan = self.plan
        for name, value in self.weights.items():
            value.requires_grad_(learns(name))
        weights = rounded(self.weights, self.formats, self.numerics)
        keep = torch.ones((), device=self.device)
        floors = torch.zeros((plan.batch, plan.length), dtype=torch.int64, device=self.device) if plan.replay_share else None
        return lambda tokens: self.model.forward(weights, tokens, floors=floors, keep=keep).logits

    def _tried(self, written: Written) -> Trial:
        use_compilation(False)  # once a batch
        found = trial(self.model, self._rounded(), written, self.plan.batch)
        use_compilation(self.device.type == "cuda")
        return found

    def _fit_confidence(self) -> None:
        """Fits the confidence head to greedy text behind prompts of another source: on text it knows, the model looks too sure."""
        name = f"{stage_name(self.model.settings.stages - 1)}.confidence_head.proj.weight"
        tried = self._tried(self.written.get("aside") or self._written(self.aside, self.plan.written_prompts, self.plan.seed))
        head, told = fitted_confidence(tried)
        self.weights[name].detach().copy_(head)
        self._settle()
        self.log({"confidence_fitted_on": tried.hits[..., 0].numel()} | told)

    # -- figures

    @torch.no_grad()
    def _settle(self) -> None:
        """Replaces weights by their rounded values, which storage keeps exactly: what is measured is what is stored."""
        for name, value in self.weights.items():
            value.requires_grad_(False).copy_(rounded({name: value}, self.formats, self.numerics)[name])

    @torch.no_grad()
    def _rounded(self) -> Weights:
        return {name: value.detach() for name, value in rounded(self.weights, self.formats, self.numerics).items()}

    def _bits(self, weights: Weights) -> float:
        use_compilation(False)  # a few calls: compiling the model without gradients would take longer
        bits = measure.bits_per_byte(self.model, weights, self.held_out_rows, self.byte_counts, self.plan.batch)
        use_compilation(self.device.type == "cuda")
        return round(bits, 5)

    @torch.no_grad()
    def _full_precision_bits(self) -> float:
        """Held-out bits per byte of the weights before they are rounded, with no cast anywhere."""
        self.model.numerics = plain = Numerics.plain()
        torch.backends.cuda.matmul.allow_tf32 = False
        weights = rounded({name: value.detach() for name, value in self.weights.items()}, self.formats, plain)
        bits = self._bits(weights)
        self.model.numerics = self.numerics
        torch.backends.cuda.matmul.allow_tf32 = True
        return bits

    def _figures(self) -> dict[str, Any]:
        weights, plan = self._rounded(), self.plan
        figures: dict[str, Any] = {"held_out_bits_per_byte": self._bits(weights)}
        use_compilation(False)
        if not plan.drafts_only:
            figures["replay"] = asdict(measure.replay(self.model, weights, self.held_out_rows, self.keep, plan.batch))
        use_compilation(self.device.type == "cuda")
        if plan.draft_anchors:
            written = self.written.get("held_out") or self._written(self.held_out, plan.written_prompts, plan.seed + 1)
            figures["drafts"] = asdict(acceptance(self._tried(written)))
        return figures

    def _memory(self) -> float:
        return round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else 0.0
