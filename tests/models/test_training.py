"""Training runs, small enough for a CPU: they learn, repeat themselves, resume, and keep what they wrote."""

from __future__ import annotations

import io
import json
import lzma
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tests share their cores; waiting threads would take them

from tapeout.models.deepseek_v41.config import shipped_config  # noqa: E402
from tapeout.models.tiny.differentiable import Numerics, initial_weights  # noqa: E402
from tapeout.models.tiny.differentiable.data import (  # noqa: E402
    batch_starts,
    read_token_file,
    read_written_file,
    replay_floors,
    write_written_file,
)
from tapeout.models.tiny.differentiable.generate import Trial, _walk, fitted_confidence  # noqa: E402
from tapeout.models.tiny.differentiable.optimizer import orthogonalised  # noqa: E402
from tapeout.models.tiny.differentiable.state import load_state, save_state  # noqa: E402
from tapeout.models.tiny.differentiable.training import Plan, Training  # noqa: E402
from tapeout.models.tiny.differentiable.weights import formats_of, rounded  # noqa: E402
from tests.models.random_checkpoint import tiny_token_map  # noqa: E402

SMALL = Plan(
    batch=2, length=64, last_step=4, warm_up=2, decay_share=0.3, replay_share=0.5, final=1, draft_anchors=4, written_prompts=2,
    written_count=12, log_every=1, measure_rows=4, replay_slack=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer's ids of a text that repeats itself: bytes are ids 3 and up."""
    ids = np.frombuffer(b"def f(x):\n    return x + 1\n" * 60, np.uint8).astype(np.uint16) + 3
    counts = np.zeros(512, np.uint8)
    counts[3:259] = 1
    buffer = io.BytesIO()
    np.savez(buffer, train=ids, held_out=ids[:400], aside=ids[200:700], byte_counts=counts, token_map=tiny_token_map().astype(np.int32))
    path = tmp_path_factory.mktemp("tokens") / "tokens.xz"
    path.write_bytes(lzma.compress(buffer.getvalue()))
    return path


@pytest.fixture(scope="module")
def run(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], Training]:
    folder = tmp_path_factory.mktemp("run")
    log: list[dict[str, Any]] = []
    training = Training(shipped_config("tiny"), token_file, SMALL, [], "cpu", log.append)
    training.run(folder)
    return folder, log, training


def test_a_run_learns_and_reports(run: tuple[Path, list[dict[str, Any]], Training]) -> None:
    _, log, _ = run
    losses = [entry["loss"] for entry in log if "step" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    figures = log[-1]["figures"]
    assert 0 < figures["held_out_bits_per_byte"] < 9
    assert figures["replay"]["divergence"] > 0
    assert 0 <= figures["drafts"]["mean"] <= 5 and len(figures["drafts"]["reached"]) == 5


def test_the_same_plan_gives_the_same_weights(run: tuple[Path, list[dict[str, Any]], Training], token_file: Path, tmp_path: Path) -> None:
    _, _, first = run
    second = Training(shipped_config("tiny"), token_file, SMALL, [], "cpu", lambda entry: None)
    second.run(tmp_path)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_final_weights_come_back_bit_for_bit(run: tuple[Path, list[dict[str, Any]], Training]) -> None:
    folder, _, training = run
    found, about = load_state([folder])
    assert about["plan"]["last_step"] == 4 and found.keys() == training.weights.keys()
    assert all(torch.equal(found[name], training.weights[name]) for name in found)
    again = rounded(found, formats_of(shipped_config("tiny")), Numerics.faithful())
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_weights_on_the_way_come_back_nearly(tmp_path: Path) -> None:
    weights = initial_weights(shipped_config("tiny"), 0)
    save_state(tmp_path, weights, {"step": 3})
    found, about = load_state([tmp_path])
    assert about == {"step": 3} and found.keys() == weights.keys()
    for name, value in weights.items():
        assert (found[name] - value).abs().max() <= 0.005 * value.abs().max(), name


def test_a_run_resumes(run: tuple[Path, list[dict[str, Any]], Training], token_file: Path, tmp_path: Path) -> None:
    folder, log, _ = run
    plan = Plan(batch=2, length=64, first_step=4, last_step=5, warm_up=1, log_every=1, measure_rows=4, replay_slack=1)
    more: list[dict[str, Any]] = []
    Training(shipped_config("tiny"), token_file, plan, [folder], "cpu", more.append).run(tmp_path)
    resumed = next(entry["loss"] for entry in more if "step" in entry)
    first = next(entry["loss"] for entry in log if "step" in entry)
    assert resumed < first - 0.5


def test_drafts_alone_leave_the_backbone_as_it_is(
    run: tuple[Path, list[dict[str, Any]], Training], token_file: Path, tmp_path: Path
) -> None:
    folder, _, before = run
    path, plan = tmp_path / "written.xz", replace(SMALL, last_step=2, drafts_only=1, pool=4, written_rows=1, replay_share=0.0)
    texts = before.greedy_texts()
    write_written_file(path, texts)
    assert read_written_file(path)["aside"].tokens.tolist() == texts["aside"].tokens.tolist()
    after = Training(shipped_config("tiny"), token_file, plan, [folder], "cpu", lambda entry: None, path)
    after.run(tmp_path)
    noise = shipped_config("tiny").text.dspark_noise_token_id
    moved = {name for name in after.weights if not torch.equal(after.weights[name], before.weights[name])}
    assert "mtp.0.attn.wkv.weight" in moved and all(name.startswith("mtp.") for name in moved - {"embed.weight"})
    rows = (after.weights["embed.weight"] != before.weights["embed.weight"]).any(1).nonzero()[:, 0].tolist()
    assert rows == [noise]


def test_epochs_tile_the_stream() -> None:
    starts = np.concatenate([batch_starts(1000, 3, 90, 0, step) for step in range(10)])
    for epoch in (starts[:10], starts[10:20]):
        assert len(set(epoch % 90)) == 1 and len(set(epoch // 90)) == 10 and epoch.max() + 90 < 1000
    assert starts[0] % 90 != starts[10] % 90


def test_replay_cuts_are_at_least_one_replay_apart() -> None:
    floors = replay_floors(5, 300, 20, 0.6, 0, 3)
    assert (floors[3:] == 0).all()
    for row in floors[:3]:
        cuts = np.unique(row[row > 0])
        assert len(cuts) and (np.diff(cuts) >= 20).all() and all(row[cut] == cut for cut in cuts) and (row <= np.arange(300)).all()


def test_walk_counts_as_a_decoder_would() -> None:
    hits = np.array([[[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 0, 1]]], bool)
    beliefs = np.full(hits.shape, 0.75)
    found = _walk(hits, beliefs)  # two accepted and one bonus token: the next anchor is 3, where one is accepted
    assert found.mean == 1.5 and found.reached == [2, 2, 1] and found.accepted == [1.0, 0.5, 0.0]
    assert found.gaps == [-0.25, 0.25, 0.75] and found.errors == [0.25, 0.25, 0.75]


def test_confidence_of_pure_chance_is_the_share_of_each_position() -> None:
    """Where what the head sees says nothing, it should say how often a position is right, and no more."""
    draw = torch.Generator().manual_seed(3)
    shares = torch.tensor([0.9, 0.6, 0.3])
    observed = torch.randn((16, 25, 3, 40), generator=draw) + 2 * torch.randn((3, 40), generator=draw)
    hits = torch.rand((16, 25, 3), generator=draw) < shares
    head, told = fitted_confidence(Trial(hits, torch.zeros(hits.shape), observed))
    beliefs = torch.sigmoid(observed @ head[0])
    assert told["chosen"][0] >= 0.1
    assert (beliefs.mean((0, 1)) - shares).abs().max() < 0.06 and beliefs.std((0, 1)).max() < 0.1


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn((3, 24, 40), generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalised(matrices))
    assert singular.min() > 0.5 and singular.max() < 1.3


def test_the_command_refuses_in_one_line(token_file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tapeout.models.tiny.train",
        "run",
        "--tokens",
        str(token_file),
        "-o",
        str(tmp_path),
        "--set",
        "speed=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --set speed=2") and "Traceback" not in done.stderr


def test_token_file_reads_back(token_file: Path) -> None:
    file = read_token_file(token_file)
    assert file.train[:3].tolist() == [ord(c) + 3 for c in "def"] and file.byte_counts.sum() == 256
    assert json.dumps(file.token_map.tolist()) == json.dumps(tiny_token_map().tolist())
