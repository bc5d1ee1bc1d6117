"""The pipeline: pass texts and their errors, the order of the list, and where a compile can be stopped, printed and dumped."""

from pathlib import Path
from typing import Any

import pytest

from tapeout.codegen.plan_memory import PlanMemory
from tapeout.codegen.select_kernels import SelectKernels
from tapeout.compiler.cache import Cache
from tapeout.compiler.driver import Watch, compile_model
from tapeout.compiler.errors import CompilerError, ModuleRefused, PipelineError, SettingsError
from tapeout.compiler.opt import run_passes
from tapeout.compiler.pipeline import KERNEL_STAGES, PASSES, graph_pipeline, parse_pipeline, run
from tapeout.compiler.settings import Settings
from tapeout.dialects._mlir import ir
from tapeout.passes.bucket_rows import BucketRows
from tapeout.passes.define import Pass
from tapeout.passes.verify import Verify
from tests.passes.modules import TINY

SMALL = {"max_rows": 7, "max_sequences": 3, "max_context": 160, "block_tokens": 16, "buckets": (7,)}
LOOPS = KERNEL_STAGES[1]
NAMES = [
    "verify",
    "assign-formats",
    "fuse-query-path",
    "fuse-norm-quantize",
    "fuse-attention-output",
    "fuse-swiglu-quantize",
    "fuse-lookup-quantize",
    "fuse-collapse-norm",
    "fuse-draft-draw",
    "verify",
    "outline-layers",
    "bucket-rows",
    "select-kernels",
    "plan-memory",
]


def test_the_list() -> None:
    assert [p.name for p in graph_pipeline(Settings(), 5)] == NAMES
    assert set(NAMES) == set(PASSES)


def test_settings_reach_the_passes() -> None:
    *_, buckets, select, plan = graph_pipeline(Settings(max_rows=33, max_sequences=3, max_outputs=9, workspace_bytes=1 << 20), 7)
    assert buckets == BucketRows((16, 33))
    assert select == SelectKernels("cpu", (), 1 << 20)
    assert isinstance(plan, PlanMemory) and plan == PlanMemory(3, 9, 7)


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("verify", [Verify()]),
        (" verify , bucket-rows ", [Verify(), BucketRows()]),
        ("bucket-rows{}", [BucketRows()]),
        ("bucket-rows{buckets=[1 2 3]},verify", [BucketRows((1, 2, 3)), Verify()]),
        ("bucket-rows{ buckets = 16 }", [BucketRows((16,))]),
        ("plan-memory{sequences=3, drafts_each=7}", [PlanMemory(sequences=3, drafts_each=7)]),
        ("select-kernels{target=cpu,workspace_bytes=1048576}", [SelectKernels("cpu", (), 1 << 20)]),
    ],
)
def test_pass_texts(text: str, passes: list[Pass]) -> None:
    assert parse_pipeline(text) == passes


NAMES_TEXT = ", ".join(PASSES)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("verfy", f"unknown pass verfy at column 1: expected one of {NAMES_TEXT}; nearest: verify"),
        ("verify, fuse-norm", f"unknown pass fuse-norm at column 9: expected one of {NAMES_TEXT}; nearest: fuse-norm-quantize"),
        ("xyz", f"unknown pass xyz at column 1: expected one of {NAMES_TEXT}"),
        ("verify,", "pass text '' at column 8: expected name or name{option=value,…}"),
        ("verify bucket-rows", "pass text 'verify bucket-rows' at column 1: expected name or name{option=value,…}"),
        ("bucket-rows{buckets=[1 2]", "pass text 'bucket-rows{buckets=[1 2]' at column 1: expected name or name{option=value,…}"),
        ("bucket-rows{{}}", "pass text 'bucket-rows{{}}' at column 1: expected name or name{option=value,…}"),
        ("verify{x=1}", "verify{x=1}: expected options none"),
        ("bucket-rows{buckets}", "bucket-rows{buckets}: expected options buckets"),
        ("bucket-rows{buckets=[a]}", "bucket-rows{buckets=[a]}: expected numbers, as [16 128]"),
        ("bucket-rows{buckets=1,buckets=2}", "bucket-rows{buckets=2}: buckets is given twice"),
        ("plan-memory{sequences=x}", "plan-memory{sequences=x}: expected a whole number of at most 65536"),
        ("select-kernels{tuned=[1 2]}", "select-kernels{tuned=[1 2]}: expected options target, workspace_bytes, drafts_each, sequences"),
    ],
)
def test_wrong_pass_texts(text: str, sentence: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_pipeline(text)
    assert str(caught.value) == f"[C102] {sentence}"


def test_a_pass_that_leaves_an_invalid_module_is_named() -> None:
    class Break(Pass):
        """A wrong pass: drops an attribute that a verifier wants."""

        name = "break"  # type: ignore[misc]
        keeps = "bits"  # type: ignore[misc]

        def run(self, module: ir.Module) -> None:
            del module.body.operations[0].entry_block.operations[0].operation.attributes["epsilon"]

    from tapeout.dialects.text import parse

    with ir.Context(), ir.Location.unknown():
        module = parse(NORM)
        with pytest.raises(ModuleRefused) as caught:
            run(module, [Verify(), Break()])
    assert str(caught.value) == "[C103] pass break left an invalid module: loc(\"-\":2:8): 'nn.rms_norm' has no attribute epsilon"


def test_observers_stand_around_every_pass() -> None:
    seen: list[str] = []
    with ir.Context(), ir.Location.unknown():
        run(
            ir.Module.create(),
            parse_pipeline("verify,bucket-rows"),
            lambda p, m: seen.append(f"before {p.name}"),
            lambda p, m: seen.append(p.name),
        )
    assert seen == ["before verify", "verify", "before bucket-rows", "bucket-rows"]


NORM = """func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 0.5 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
"""


def test_modules_are_separate() -> None:
    """One file, two modules; what is wrong with the second names it, and a module may be empty."""
    assert len(run_passes(f"{NORM}// -----\n{NORM}", "verify")) == 2
    assert run_passes("", "verify") == ["module {\n}\n"]
    with pytest.raises(ModuleRefused, match=r'^\[C103\] module 1: loc\("-":1:1\): custom op \'hello\' is unknown'):
        run_passes(f"{NORM}// -----\nhello", "")


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_starts_from_the_graph_level(name: str) -> None:
    declared = 'func.func private @f(tensor<?xi32>)'
    with pytest.raises(ModuleRefused, match=rf"^\[C103\] pass {name}: @f at loc\(.*\) has 0 blocks; expected one: the graph level has no"):
        run_passes(declared, name)


def test_a_dumped_kernel_is_no_module_for_passes() -> None:
    with pytest.raises(ModuleRefused, match=r"unregistered dialect.*; expected a module of the graph level: kernels are written for reading$"):
        run_passes('"tile.program_id"() : () -> index', "verify")


def compiled(tmp_path: Path, **settings: Any) -> tuple[object, list[str], list[tuple[str, str]]]:
    stages: list[str] = []
    printed: list[tuple[str, str]] = []
    watch = Watch(ir=lambda stage, content: printed.append((stage, content)), stage=stages.append)
    made = compile_model(TINY, Settings(**SMALL, **settings), tmp_path / "out", Cache(tmp_path / "cache"), watch)
    assert made is None and not (tmp_path / "out").exists()
    return made, stages, printed


@pytest.mark.parametrize("name", ["assign-formats", "verify", "plan-memory"])
def test_stop_after(tmp_path: Path, name: str) -> None:
    """The last pass of the name is the last that runs; nothing is written."""
    _, stages, _ = compiled(tmp_path, stop_after=name)
    assert stages == ["graph", *NAMES[: len(NAMES) - NAMES[::-1].index(name)]]


def test_stop_after_lower_to_tile_and_print(tmp_path: Path) -> None:
    _, stages, printed = compiled(tmp_path, stop_after="lower-to-tile", print_ir_after=("lower-to-tile",))
    assert stages[-1] == "plan" and len(printed) > 50
    assert all(stage.startswith("lower-to-tile ") and "func.func" in content for stage, content in printed)


def test_print_ir(tmp_path: Path) -> None:
    assert [s for s, _ in compiled(tmp_path, stop_after="bucket-rows", print_ir_after=("verify",))[2]] == ["verify", "verify"]
    assert [s for s, _ in compiled(tmp_path, stop_after="verify", print_ir_after=("all",))[2]] == ["graph", *NAMES[:10]]
    changed = [s for s, _ in compiled(tmp_path, stop_after="verify", print_ir_after=("changed",))[2]]
    assert changed == ["graph", *NAMES[1:9]]  # verify changes nothing
    assert [s for s, _ in compiled(tmp_path, stop_after="verify", print_ir_after=("graph",))[2]] == ["graph"]


def test_dump(tmp_path: Path) -> None:
    compiled(tmp_path, stop_after="fuse-query-path", dump=tmp_path / "ir" / "deep")
    files = sorted(p.name for p in (tmp_path / "ir" / "deep").iterdir())
    assert files == ["00-graph.mlir", "01-verify.mlir", "02-assign-formats.mlir", "03-fuse-query-path.mlir"]
    dumped = (tmp_path / "ir" / "deep" / files[1]).read_text()
    (again,) = run_passes(dumped, "assign-formats,fuse-query-path")
    (wanted,) = run_passes((tmp_path / "ir" / "deep" / files[3]).read_text(), "")
    assert again == wanted  # a dumped module is a place to go on from


def test_check_passes_runs_within_a_compile(tmp_path: Path) -> None:
    assert compiled(tmp_path, stop_after="outline-layers", check_passes=True)[1][-1] == "outline-layers"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop_after": "all"}, "--stop-after: unknown pass all; expected one of "),
        ({"stop_after": "changed"}, "--stop-after: unknown pass changed; expected one of "),
        ({"stop_after": "verfy"}, "--stop-after: unknown pass verfy; expected one of "),
        ({"print_ir_after": ("x", "verify", "y")}, "--print-ir-after: unknown pass x, y; expected one of "),
        ({"target": "sm90", "stop_after": LOOPS}, "--stop-after: lower-tile-to-loops is a stage of --target cpu, found --target sm90; expected "),
        ({"target": "cpu,sm90", "stop_after": LOOPS}, "--stop-after: lower-tile-to-loops is a stage of --target cpu, found --target cpu,sm90"),
        ({"print_ir_after": (LOOPS,)}, "--print-ir-after: unknown pass lower-tile-to-loops; expected one of "),
        (
            {"print_ir_after": ("verify", "bucket-rows", "lower-to-tile"), "stop_after": "verify"},
            "--print-ir-after: bucket-rows, lower-to-tile comes behind --stop-after verify; expected a pass that runs",
        ),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    stages: list[str] = []
    with pytest.raises(CompilerError) as caught:
        compile_model(TINY, Settings(**SMALL, **settings), tmp_path, Cache(tmp_path), Watch(stage=stages.append))
    assert str(caught.value).startswith(f"[C102] {sentence}") and stages == []


def test_options_that_no_graph_fits_are_refused(tmp_path: Path) -> None:
    longest = TINY.text.max_position_embeddings
    settings = Settings(**{**SMALL, "max_context": longest + 1}, stop_after="verify")  # type: ignore[arg-type]
    with pytest.raises(
        SettingsError, match=rf"--max-context: found {longest + 1}, expected at most the model's {longest} positions"
    ):
        compile_model(TINY, settings, tmp_path, Cache(tmp_path))
