"""A kernel-tuning experiment as docs/tuning.md tells it: find a row, change it, compile with it, see it, put it back."""

import json
from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.kernel import KernelError
from tapeout.codegen.nvidia.overrides import scale_limits
from tapeout.codegen.select_kernels import Choice
from tests.compiler.test_commands import TINY, Tapeout, tapeout  # noqa: F401 (the fixture)
from tests.end_to_end.conftest import SETTINGS, Model, model  # noqa: F401 (the fixture)

STEP = ["--max-rows", SETTINGS.max_rows, "--block-tokens", SETTINGS.block_tokens]
COMPILED = [*STEP, "--max-sequences", SETTINGS.max_sequences, "--max-context", SETTINGS.max_context]
PLANNED = [*STEP, "--max-sequences", SETTINGS.max_sequences, "--max-context", SETTINGS.max_context]


def test_the_page_s_row_is_possible(tapeout: Tapeout, tmp_path: Path) -> None:  # noqa: F811
    page = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    (tmp_path / "tuning.json").write_text(page.split("```json\n")[1].split("```")[0])
    command = next(line for line in page.splitlines() if "--write-tuning" in line)
    arguments = [TINY if word.endswith(".json") else word for word in command.split()[1:] if word not in ("--write-tuning", "rows.json")]
    kernels = tapeout.json(*arguments, "--tuning", tmp_path / "tuning.json", "--kernel", "linear")["kernels"]
    (_, (request, rows)) = json.loads((tmp_path / "tuning.json").read_text()).items()
    found = {k["schedule"]["block_m"]: k["launches"] for k in kernels if k["request"] == request}
    assert set(found) == {96, 192} and all(set(of) == {"128"} for of in found[96].values()) and rows["128"]["block_m"] == 96


def test_an_experiment_on_the_cpu(tapeout: Tapeout, model: Model, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "v1").symlink_to(model.artifact.parent / "cache")
    rows, tuned, artifact = tmp_path / "rows.json", tmp_path / "tuning.json", tmp_path / "artifact"
    assert tapeout("plan", model.weights, *PLANNED, "--write-tuning", rows) == 0
    known = json.loads(rows.read_text())
    request = next(request for request in known if request.startswith("nn.linear"))
    tuned.write_text(json.dumps({"target": "cpu", request: known[request] | {"block_m": 96}}))

    made = tapeout.json("compile", model.weights, "-o", artifact, *COMPILED, "--tuning", tuned)
    assert made["kernels_compiled"] == 1
    assert json.loads((artifact / "tuning.json").read_text()) == json.loads(tuned.read_text())
    shown = tapeout.json("inspect", artifact, "--kernel", "linear")["kernels"]
    assert len(shown) > 5 and {k["origin"] for k in shown if k["request"] == request} == {"tuned"}
    assert {k["origin"] for k in shown if k["request"] != request} == {"default"}
    (one,) = (k for k in shown if k["request"] == request)
    assert one["schedule"]["block_m"] == 96 and one["files"] == [f"source/cpu/{one['symbol']}.mlir"] and one["launches"]
    assert tapeout("inspect", artifact, "--kernel", one["symbol"]) == 0
    assert tapeout.out.startswith(f"{one['symbol']} (tuned)\n  request   {request}\n") and "block_m=96" in tapeout.out

    again = tapeout.json("compile", model.weights, "-o", artifact, *COMPILED, "--tuning", artifact / "tuning.json")
    assert (again["identity"], again["kernels_compiled"]) == (made["identity"], 0)
    own = tapeout.json("compile", model.weights, "-o", artifact, *COMPILED)
    assert own["identity"] == json.loads((model.artifact / "manifest.json").read_text())["identity"] != made["identity"]
    assert (artifact / "tuning.json").read_text() == "{}\n"


def test_a_kernel_is_shown_with_what_bounds_it(tapeout: Tapeout) -> None:  # noqa: F811
    data = tapeout.json("plan", TINY, "--target", "sm90", "--kernel", "expert_linear")["kernels"]
    whole = [k for k in data if "part" not in k["schedule"]]
    assert whole and all(b["kernel"] == k["symbol"] and b["bound_us"] > 0 for k in whole for b in k["bounds"])
    for kernel in whole:
        assert {(b["entry"], str(b["bucket"])) for b in kernel["bounds"]} == {(e, b) for e, of in kernel["launches"].items() for b in of}


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["plan", TINY, "--kernel", "lineer"], "--kernel: found lineer, expected a kernel's symbol or how it begins, as linear_"),
    (["inspect", TINY, "--kernel", "linear"], f"--kernel: {TINY} is no artifact; its kernels are shown by tapeout plan --kernel"),
    (["plan", TINY, "--write-tuning", f"{TINY}/rows.json"], "--write-tuning"),
])  # fmt: skip
def test_refused(tapeout: Tapeout, arguments: list[str], sentence: str) -> None:  # noqa: F811
    assert tapeout(*arguments) == 1 and sentence in tapeout.err


def test_rows_never_replace_the_configuration(tapeout: Tapeout, tmp_path: Path) -> None:  # noqa: F811
    config = tmp_path / "config.json"
    config.write_bytes(Path(TINY).read_bytes())
    for place in (config, tmp_path):
        assert tapeout("plan", place, "--write-tuning", config) == 1
        assert f"[C105] --write-tuning {config}: found the file of configuration, expected a file of its own" in tapeout.err
    assert config.read_bytes() == Path(TINY).read_bytes()


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"block_n": 256, "panel": 0}, "is no tile kernel: 'tile.load' box [128, 256] is wider than the array [128, 128]"),
])  # fmt: skip
def test_a_row_whose_ops_refuse_each_other(tapeout: Tapeout, tmp_path: Path, changes: dict[str, int], sentence: str) -> None:  # noqa: F811
    rows = tmp_path / "rows.json"
    assert tapeout("plan", TINY, "--write-tuning", rows) == 0
    known: dict[str, Any] = json.loads(rows.read_text())
    request = next(r for r, row in known.items() if "[128, 128] f8E4M3FN*e8m0[32x32]" in r and row.get("panel"))
    rows.write_text(json.dumps({"target": "cpu", request: known[request] | changes}))
    assert tapeout("plan", TINY, "--tuning", rows) == 1
    assert request in tapeout.err and sentence in tapeout.err


def test_an_override_that_is_not_there() -> None:
    with pytest.raises(KernelError, match="schedule entry override of linear is 6, expected 0 to 5"):
        scale_limits(Choice(None, "linear", (("override", 6),)))  # type: ignore[arg-type]
