"""The tiny model as an Ascend artifact, executed by the simulator through the same engine as every device: tokens and logits of the CPU.

Lowered kernels are kept between runs in pytest's cache folder: a first run compiles them (half a minute on two cores).
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device.ascend_sim import AscendSimDevice
from tapeout.runtime.engine import EngineOptions
from tapeout.runtime.llm import open_engine
from tests.bench.gpu_meaning import check, summary
from tests.bench.meanings.cases import case_data, case_from, cases_of
from tests.codegen.ascend.harness import kept, tools
from tests.end_to_end.conftest import Model, prompt

SETTINGS = Settings(target="ascend950", max_rows=32, max_sequences=2, max_context=64, block_tokens=16)


@pytest.fixture(scope="module")
def simulated(model: Model, request: pytest.FixtureRequest) -> Path:
    """The artifact for Ascend, one for all test processes."""
    tools()
    folder = model.artifact.parent / "ascend"
    with FileLock(model.artifact.parent / "ascend-lock"):
        if not folder.exists():
            compile_path(model.weights, folder, SETTINGS, cache=kept(request.config, folder.parent / "kernels"))
    return folder


def test_logits_are_those_of_the_cpu(model: Model, simulated: Path) -> None:
    """A chunk that crosses the window, then two single rows: every kind of layer, every kernel of step, encoder and decoder."""
    tokens = prompt(19, 5)
    engine, _ = open_engine(load_artifact(simulated, target=SETTINGS.target), model.weights, EngineOptions(simulated=True))
    with model.engine(workers=1) as cpu:
        for start, end in ((0, 17), (17, 18), (18, 19)):
            (found,), (wanted,) = (each.forward([(0, tokens[start:end])]) for each in (engine, cpu))
            np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05 * np.abs(wanted).max())
            assert (found.argmax(-1) == wanted.argmax(-1)).mean() > 0.9
    device = engine.device
    assert isinstance(device, AscendSimDevice)
    used = {launch.kernel for name in ("step", "encoder", "decoder") for launch in engine.artifact.programs[name][16].launches}
    assert {engine.artifact.manifest.kernels[k].symbol for k in used} <= set(device.counts)
    assert sum(counts.products for counts in device.counts.values()) > 10**7, "products run on the cube core"
    engine.close()


@pytest.mark.simulated
def test_every_kernel_is_what_its_op_means(model: Model, simulated: Path) -> None:
    """Launch by launch, over random weights and states, on poisoned rows behind the count."""
    artifact = load_artifact(simulated, target=SETTINGS.target)
    cases = {case.symbol: case_from(case_data(case)) for case in cases_of(model.config, SETTINGS)}
    table = summary(check(artifact, AscendSimDevice(artifact), cases, rows=(1, 17, 32)))
    assert not [(row["kernel"], row["wrong"]) for row in table if row["wrong"]]
    assert {row["kernel"] for row in table} == {k.symbol for k in artifact.manifest.kernels if not cases[k.symbol].part}


@pytest.mark.full
def test_the_command_line_gives_the_tokens_of_the_cpu(model: Model, simulated: Path, tmp_path: Path) -> None:
    """A prompt of 24 tokens and four new ones, greedy."""
    asked = tmp_path / "prompts"
    asked.write_text(" ".join(map(str, prompt(24, 1))) + "\n")
    answers = []
    for device, artifact in (("cpu", model.artifact), ("ascend-sim", simulated)):
        command = [sys.executable, "-m", "tapeout.compiler", "run", str(artifact), "--weights", str(model.weights), "--token-ids", str(asked),
                   "--max-tokens", "4", "--device", device, "--json"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[0])["token_ids"])
    assert answers[0] == answers[1] and len(answers[0]) == 4
