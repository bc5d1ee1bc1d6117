"""Every command as a user runs it: output for people, --json keys, exit codes 0 to 4, and what a message holds.

The tiny artifact is the one that all end-to-end tests share.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tapeout.compiler.cache import Cache
from tapeout.compiler.commands import main
from tapeout.models import deepseek_v41
from tests.end_to_end.conftest import SETTINGS, Model, model  # noqa: F401 (the fixture)
from tests.models.shards import copied, read_index, read_shard, write_shard

CONFIGS = Path(deepseek_v41.__file__).parent
TINY, REAL = (str(CONFIGS / f"config-{name}.json") for name in ("tiny", "v4.1-flash"))
SMALL = ["--max-rows", "16", "--max-sequences", "2", "--max-context", "256", "--block-tokens", "16"]
COMMANDS = {"compile", "doctor", "finish", "inspect", "opt", "plan", "run", "sim", "cache"}
NORM = """func.func @f(%x: tensor<?x64xbf16> {tapeout.extent = "rows"}, %w: tensor<64xbf16>) -> tensor<?x64xbf16> {
  %0 = nn.rms_norm(%x, %w) {epsilon = 0.5 : f64} : (tensor<?x64xbf16>, tensor<64xbf16>) -> tensor<?x64xbf16>
  return %0 : tensor<?x64xbf16>
}
"""


class Tapeout:
    """Runs the command line in this process; `code`, `out` and `err` are those of the last run."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        self.code = main([str(a) for a in arguments])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return self.code

    def json(self, *arguments: object) -> Any:
        assert self(*arguments, "--json") == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def tapeout(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tapeout:
    monkeypatch.setenv("TAPEOUT_CACHE_DIR", str(tmp_path / "cache"))
    return Tapeout(capsys)


def blocked(*arguments: str, without: tuple[str, ...] = ("torch_mlir",)) -> "subprocess.CompletedProcess[str]":
    """The command in a process where some packages cannot be imported."""
    program = (
        f"import sys\nfor name in {without!r}: sys.modules[name] = None\n"
        "from tapeout.compiler.commands import main\nsys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


# -- help and usage


def test_help_lists_every_command(tapeout: Tapeout) -> None:
    assert tapeout("--help") == 0
    assert {line.split()[0] for line in tapeout.out.split("Commands:")[1].splitlines() if line.strip()} >= COMMANDS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(tapeout: Tapeout, command: str) -> None:
    assert tapeout(command, "--help") == 0
    assert tapeout.out.startswith(f"Usage: tapeout {command} ")


def test_help_is_quick_and_starts_no_compiler() -> None:
    """Median of five, in processor time, so that a busy machine does not count; and nothing heavy is imported."""
    taken = []
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-m", "tapeout.compiler", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        taken.append(usage.ru_utime + usage.ru_stime)
    assert median(taken) < 0.3, taken
    heavy = ("torch_mlir", "numpy", "torch", "pydantic", "tokenizers", "safetensors", "rich")
    assert blocked("--help", without=heavy).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nothing"],
        ["nothing"],
        ["compile"],
        ["compile", TINY],
        ["plan"],
        ["plan", TINY, "--max-context", "many"],
        ["run", "artifact"],
        ["opt"],
        ["inspect"],
        ["cache", "nothing"],
        ["doctor", "extra"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(tapeout: Tapeout, arguments: list[str]) -> None:
    assert tapeout(*arguments) == 2
    assert "Error" in tapeout.err


# -- inspect


def test_inspect_configuration(tapeout: Tapeout) -> None:
    data = tapeout.json("inspect", REAL)
    assert data["tensors"] == 96_085 and data["bytes"] == 510_286_023_000  # model spec 12.1
    assert data["parameters"] == {
        "total": 763_205_315_794,
        "backbone": 551_880_835_184,
        "active_prefill": 7_895_220_224,
        "active_decode": 15_468_068_864,
        "head": 661_913_600,
        "draft": 14_225_362_530,
        "vision": 485_268_480,
        "engram_tables": 196_613_849_600,
    }
    assert sum(data["bytes_by_dtype"].values()) == data["bytes"] and data["checkpoint"] is None
    assert tapeout("inspect", REAL) == 0
    assert "active: prefill 7,895,220,224, decode 15,468,068,864, lm head 661,913,600" in tapeout.out
    assert "total" in tapeout.out and "763,205,315,794" in tapeout.out


def test_inspect_reads_scales_on_request(tapeout: Tapeout, model: Model, tmp_path: Path) -> None:  # noqa: F811
    name = "layers.3.attn.wq_a.scale"
    assert tapeout.json("inspect", model.weights, "--scales")["checkpoint"]["scales"] > 100
    assert tapeout.json("inspect", model.weights)["checkpoint"]["scales"] is None
    folder = copied(model.weights, tmp_path / "damaged")
    shard = folder / read_index(folder)["weight_map"][name]
    header, payload = read_shard(shard)
    start, stop = header[name]["data_offsets"]
    write_shard(shard, header, payload[:start] + b"\xff" * (stop - start) + payload[stop:])
    assert tapeout("inspect", folder, "--scales") == 1
    assert f"[M215] {name} in {shard.name}: a scale tensor holds the NaN byte" in tapeout.err and tapeout.err.count("[M2") == 1
    for path, what in ((model.artifact, "an artifact"), (REAL, "no shards")):
        assert tapeout("inspect", path, "--scales") == 1 and f"--scales: {path}: found {what}" in tapeout.err
    assert tapeout("inspect", model.weights, "--scales", "--kernel", "linear") == 1
    assert f"--scales: {model.weights}: found --kernel beside it, expected a Hugging Face folder with its checkpoint" in tapeout.err


def test_inspect_checkpoint_and_artifact(tapeout: Tapeout, model: Model) -> None:  # noqa: F811
    found = tapeout.json("inspect", model.weights)["checkpoint"]
    assert found["unmapped"] == 0 and found["shards"] == 3 and found["mapped"] > 100 and found["strays"] == []
    data = tapeout.json("inspect", model.artifact)
    assert set(data) == {
        "identity",
        "architecture",
        "fingerprint",
        "targets",
        "options",
        "row_buckets",
        "launches",
        "toolchain",
        "kernels",
        "states",
    }
    assert data["row_buckets"] == list(SETTINGS.row_buckets) and data["targets"] == ["cpu"]
    assert set(data["launches"]) == {"step", "encoder", "decoder", "sample", "draft"}
    assert tapeout("inspect", model.artifact) == 0
    assert f"artifact {data['identity'][:16]} of DeepseekV41ForCausalLM for cpu" in tapeout.out


def test_inspect_refuses(tapeout: Tapeout, tmp_path: Path) -> None:
    assert tapeout("inspect", tmp_path / "none") == 1
    assert str(tmp_path / "none") in tapeout.err
    document = json.loads(Path(TINY).read_text())
    document["surprise"] = 1
    wrong = tmp_path / "config.json"
    wrong.write_text(json.dumps(document))
    assert tapeout("inspect", wrong) == 1 and "surprise" in tapeout.err
    assert tapeout("inspect", wrong, "--allow-unknown-keys") == 0
    assert "surprise" in tapeout.out.split("keys without effect: ")[1]


# -- plan


def test_plan_of_the_real_model(tapeout: Tapeout) -> None:
    """Hand numbers of the model spec: 890 bytes a token (11), 15.79 and 32.26 GFLOP a token (12.2)."""
    data = tapeout.json("plan", REAL, "--max-context", 4096, "--max-sequences", 8, "--max-rows", 16)
    assert data["state"]["bytes_per_token"] == 890
    assert data["state"]["bytes"] == 8 * (4096 * 890 + data["state"]["bytes_per_sequence"])
    assert data["flops"] == {"prefill": 2 * 7_895_220_224, "decode": 2 * (15_468_068_864 + 661_913_600)}
    assert round(data["flops"]["prefill"] / 1e9, 2) == 15.79 and round(data["flops"]["decode"] / 1e9, 2) == 32.26
    text = 510_286_023_000 - 970_536_960  # all bytes (12.1) without the vision tower's
    beyond = sum(data["weights"].values()) - text  # FP8 scales are written out for every row, angle tables and token map are made at load
    assert 0 < beyond < text / 1000
    assert data["weights"]["mapped"] >= 202_758_032_400 + 1_323_827_200  # Engram tables and embedding are never copied
    assert data["arena_bytes"] == data["arena"]["scratch"] + sum(data["arena"]["exchange"].values())
    assert data["arena"]["exchange"]["logits"] == 16 * 129_280 * 4
    assert data["arena"]["by_bucket"] == {"16": data["arena"]["scratch"]}


def test_plan_for_people_and_for_machines(tapeout: Tapeout) -> None:
    arguments = ["plan", TINY, "--max-context", 256, "--max-sequences", 2, "--max-rows", 16, "--block-tokens", 16]
    data = tapeout.json(*arguments)
    assert {"state", "flops", "weights", "arena_bytes", "arena", "kernels", "launches"} <= set(data)
    assert {"symbol", "family", "request", "schedule"} <= set(data["kernels"][0])
    assert len({k["symbol"] for k in data["kernels"]}) == len(data["kernels"]) > 50
    assert tapeout(*arguments) == 0
    assert f"state: {data['state']['bytes_per_token']:,} B/token" in tapeout.out and f"arena: {data['arena_bytes']:,} B" in tapeout.out
    assert all(k["symbol"] in tapeout.out for k in data["kernels"])
    assert "work per token: prefill 0.003316 GFLOP, decode 0.005355 GFLOP" in tapeout.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-context", "0"], "--max-context: found 0, expected 1 to 16777216"),
        (["--target", "abacus"], "--target: found 'abacus', expected one of"),
        (["--target", "sm90,cpu"], "--target: found sm90,cpu, expected one target"),
        (["--block-tokens", "7"], "--block-tokens: found 7"),
        (["--max-context", "16000000"], "--max-context: found 16000000, expected at most the model's 4096 positions"),
        (["--max-sequences", "0"], "--max-sequences: found 0, expected 1 to --max-rows (512)"),
        (["--workspace", "99999999999999999999"], "--workspace: found 1e+20 MiB, expected 1 to 1048576 MiB"),
        (["--max-outputs", "99999999999999999999"], "--max-outputs: found 99999999999999999999"),
        (["--block-tokens", "99999999999999999998"], "--block-tokens: found 99999999999999999998"),
    ],
)
def test_plan_refuses(tapeout: Tapeout, arguments: list[str], sentence: str) -> None:
    assert tapeout("plan", TINY, *arguments) == 1
    assert sentence in tapeout.err and tapeout.err.startswith("tapeout: [C10")


# -- compile


def test_compile(tapeout: Tapeout, model: Model, tmp_path: Path) -> None:  # noqa: F811
    """The shared artifact again, from the shared cache: same identity; a second output that is not ours is refused."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "v1").symlink_to(model.artifact.parent / "cache")
    out = tmp_path / "artifact"
    data = tapeout.json(
        "compile",
        model.weights,
        "-o",
        out,
        "--max-rows",
        SETTINGS.max_rows,
        "--max-sequences",
        SETTINGS.max_sequences,
        "--max-context",
        SETTINGS.max_context,
        "--block-tokens",
        SETTINGS.block_tokens,
    )
    assert {"artifact", "identity", "kernels", "bytes", "seconds"} <= set(data)
    assert data["artifact"] == str(out) and data["bytes"] == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    assert data["identity"] == json.loads((model.artifact / "manifest.json").read_text())["identity"]
    assert data["kernels_compiled"] == 0
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    assert tapeout("compile", model.weights, "-o", foreign, *SMALL, "--stop-after", "verify") == 0
    assert (foreign / "thesis.txt").read_text() == "mine"


def test_compile_prints_and_stops(tapeout: Tapeout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tapeout("compile", TINY, "-o", out, *SMALL, "--stop-after", "assign-formats", "--print-ir-after", "verify") == 0
    assert tapeout.out.startswith("// ---- after verify\nmodule @tapeout {") and not out.exists()
    assert tapeout("compile", TINY, "-o", out, *SMALL, "--stop-after", "verify", "--dump", tmp_path / "ir", "--check-passes") == 0
    assert sorted(p.name for p in (tmp_path / "ir").iterdir())[:2] == ["00-graph.mlir", "01-verify.mlir"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--row-buckets", "8;16"], "--row-buckets: found '8;16', expected row counts as 16,128,512"),
        (["--row-buckets", "8,12"], "--row-buckets: the last one is 12, expected --max-rows (16)"),
        (["--stop-after", "nothing"], "--stop-after: unknown pass nothing"),
        (["--stop-after", ""], "--stop-after: unknown pass ; expected one of"),
        (["--tuning", "none.json"], "--tuning none.json: found No such file or directory, expected a readable file"),
        (["--cpu", "i386"], "--cpu: found i386"),
        (["--jobs", "0"], "--jobs: found 0"),
        (["--dump", ""], "--dump: found '', expected the path of a folder"),
        (["--dump", "out/ir"], "--dump: found out/ir, which is inside the artifact's folder, expected another one"),
        (["--dump", f"{TINY}/dump"], f"--dump {TINY}/dump: found Not a directory, expected a folder that can be written"),
    ],
)
def test_compile_refuses(
    tapeout: Tapeout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tapeout("compile", TINY, "-o", tmp_path / "out", *SMALL, *arguments) == 1
    assert sentence in tapeout.err and not [*tmp_path.iterdir()]


# -- run


def test_run(tapeout: Tapeout, model: Model, tmp_path: Path) -> None:  # noqa: F811
    common = ["run", model.artifact, "--weights", model.weights, "--max-tokens", 4, "--workers", 1]
    assert tapeout(*common, "--prompt", "one", "--prompt", "two", "--json") == 0
    first, second, totals = map(json.loads, tapeout.out.splitlines())
    assert {"id", "prompt_tokens", "text", "token_ids", "finish_reason", "stop_reason", "seed"} <= set(first)
    assert (first["id"], second["id"]) == ("0", "1") and len(first["token_ids"]) <= 4
    assert totals["totals"]["requests"] == 2
    (tmp_path / "prompts.jsonl").write_text(f'{{"id": "a", "token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": true}}\n')  # noqa: F541
    (tmp_path / "ids.txt").write_text("5 6 7\n\n8 9\n")
    out = tmp_path / "out.jsonl"
    assert tapeout(*common, "--prompts", tmp_path / "prompts.jsonl", "--token-ids", tmp_path / "ids.txt", "--out", out) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("id") for line in lines] == ["a", "1", "2", None] and len(lines[0]["token_ids"]) == 2
    assert "3 requests, 8 prompt tokens" in tapeout.out
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".out")] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "prompts.jsonl: found no line with a prompt"),
        ("{", "prompts.jsonl:1 - found no JSON"),
        ("[]", "prompts.jsonl:1 - found list, expected an object with either `prompt` or `token_ids`"),
        ('{"prompt": "a", "token_ids": [1]}', "prompts.jsonl:1 - found both, expected an object with either `prompt` or `token_ids`"),
        ('{"prompt": "a", "temprature": 1}', 'prompts.jsonl:1 - found an unknown field "temprature", expected id, prompt, token_ids, temperature'),
        ('{"token_ids": [1.5]}', "prompts.jsonl:1, token_ids - found [1.5], expected a list of whole numbers"),
        ('\n\n{"prompt": 3}', "prompts.jsonl:3, prompt - found int, expected text"),
    ],
    ids=["none", "json", "list", "both", "unknown", "numbers", "line"],
)
def test_run_refuses_prompts(tapeout: Tapeout, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert tapeout("run", tmp_path, "--weights", tmp_path, "--prompts", path) == 1
    assert sentence in tapeout.err


def test_run_refuses_files(tapeout: Tapeout, tmp_path: Path, model: Model) -> None:  # noqa: F811
    assert tapeout("run", tmp_path / "none", "--weights", model.weights, "--prompt", "a") == 1
    assert str(tmp_path / "none") in tapeout.err
    assert tapeout("run", model.artifact, "--weights", tmp_path / "none", "--prompt", "a") == 1
    assert str(tmp_path / "none") in tapeout.err
    (tmp_path / "ids.txt").write_text("1 two 3\n")
    assert tapeout("run", model.artifact, "--weights", model.weights, "--token-ids", tmp_path / "ids.txt") == 1
    assert "ids.txt:1 - found '1 two 3', expected token ids separated by spaces" in tapeout.err


# -- opt


def test_opt(tapeout: Tapeout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "norm.mlir"
    path.write_text(f"{NORM}// -----\n{NORM}")
    assert tapeout("opt", path, "-p", "verify,bucket-rows{buckets=[3]}") == 0
    assert tapeout.out.count("attributes {tapeout.buckets = [3]}") == 2 and tapeout.out.count("// -----") == 1
    data = tapeout.json("opt", path)
    assert data["passes"] == "" and len(data["modules"]) == 2
    assert tapeout("opt", path, "-p", "verfy") == 1
    assert tapeout.err.startswith("tapeout: [C102] unknown pass verfy at column 1") and tapeout.err.rstrip().endswith("nearest: verify")
    path.write_bytes(b"\xff\xfe")
    assert tapeout("opt", path) == 1 and f"[C105] module {path}: found bytes that are not text" in tapeout.err
    assert tapeout("opt", tmp_path / "none.mlir") == 1
    assert tapeout.err == (
        f"tapeout: [C105] module {tmp_path / 'none.mlir'}: found No such file or directory, expected a readable file; give another file\n"
    )
    path.write_text(NORM)
    for passes, sentence in (
        ("bucket-rows{buckets=[99999999999999999]}", "expected ascending row counts from 1 to 65536, found [99999999999999999]"),
        ("verify,plan-memory{drafts_each=99999999999999999999}", "expected a whole number of at most 65536"),
    ):
        assert tapeout("opt", path, "-p", passes) == 1 and sentence in tapeout.err
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(NORM))
    assert tapeout("opt", "-") == 0 and "nn.rms_norm(" in tapeout.out


# -- cache and doctor


def test_cache(tapeout: Tapeout, tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache" / "v1")
    keys = ["ab" * 32, "cd" * 32]
    for key, size in zip(keys, (10, 20), strict=True):
        store.get_or_make(key, lambda size=size: b"x" * size)  # type: ignore[misc]
    entries = [{"key": keys[0], "bytes": 10}, {"key": keys[1], "bytes": 20}]
    assert tapeout.json("cache", "ls") == {"root": str(store.root), "bytes": 30, "entries": entries}
    assert tapeout("cache", "ls") == 0 and all(key in tapeout.out for key in keys)
    assert tapeout.json("cache", "verify") == {"root": str(store.root), "entries": 2, "damaged": []}
    next(iter(store.entries())).path.write_bytes(b"damaged")
    assert tapeout("cache", "verify") == 1 and f"2 entries, 1 damaged\n  {keys[0]}" in tapeout.out
    assert tapeout.json("cache", "prune", "--keep", 1) == {"root": str(store.root), "removed": 1, "bytes": 7}
    assert tapeout("cache", "prune") == 0 and "removed 1 entries, 20 bytes" in tapeout.out
    assert tapeout.json("cache", "ls", "--cache", tmp_path / "other")["entries"] == []
    store.get_or_make(keys[0], lambda: b"again")
    for folder in (tmp_path / "cache", store.root):  # what TAPEOUT_CACHE_DIR says, and what `ls` prints
        assert tapeout.json("cache", "ls", "--cache", folder)["root"] == str(store.root)
    assert tapeout.json("cache", "prune", "--cache", tmp_path / "cache")["removed"] == 1, "not nothing, without a word"
    (tmp_path / "file").write_text("mine")
    for command in ("ls", "verify", "prune"):
        assert tapeout("cache", command, "--cache", tmp_path / "file") == 1
        assert tapeout.err.startswith(f"tapeout: [C106] compile cache {tmp_path / 'file'}: found a file, expected a folder")
    assert tapeout("cache", "prune", "--keep", -1) == 2 and (tmp_path / "file").read_text() == "mine"


def test_doctor(tapeout: Tapeout, tmp_path: Path) -> None:
    data = tapeout.json("doctor")
    assert all(set(row) == {"what", "found", "needed", "ok", "do"} for row in data)
    rows = {row["what"]: row for row in data}
    assert (
        rows["python (running)"]["ok"] and rows["torch-mlir (compiling)"]["ok"] and rows["compile cache"]["found"] == str(tmp_path / "cache" / "v1")
    )
    assert tapeout("doctor") == 0 and "ok      python (running): found " in tapeout.out


# -- missing tools, internal errors


@pytest.mark.parametrize("arguments", [["plan", TINY], ["compile", TINY, "-o", "nowhere"], ["opt", TINY]], ids=lambda a: a[0])
def test_without_the_bindings_compiling_is_3(arguments: list[str]) -> None:
    done = blocked(*arguments)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert (
        "the MLIR bindings (torch_mlir) are not installed; found none, needed torch-mlir==20261001: pip install 'tapeout[compile]'"
        in done.stderr
    )


def test_without_the_bindings_the_rest_works(model: Model) -> None:  # noqa: F811
    for arguments in (
        ["--help"],
        ["inspect", TINY],
        ["inspect", str(model.artifact)],
        ["cache", "ls", "--cache", "nowhere"],
        ["run", str(model.artifact), "--weights", str(model.weights), "--prompt", "a", "--max-tokens", "1"],
    ):
        done = blocked(*arguments, without=("torch_mlir", "torch", "triton", "jinja2"))
        assert done.returncode == 0, (arguments, done.stderr)


def test_an_internal_error_is_4_and_leaves_a_folder(tapeout: Tapeout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    from tapeout.compiler import opt

    def fail(source: str, passes: str) -> list[str]:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(opt, "run_passes", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "input file.mlir"
    path.write_text(NORM)
    assert tapeout("opt", path, "-p", "verify") == 4
    (folder,) = tmp_path.glob("tapeout-error-*")
    assert tapeout.err == (
        f"tapeout: internal error (ZeroDivisionError: a fault of ours); expected none: this is a fault of tapeout. What "
        f"reproduces it is in {folder}; please report it with that folder\n"
    )
    assert (folder / "command.txt").read_text() == f"tapeout opt '{path}' -p verify\n"
    assert "ZeroDivisionError: a fault of ours" in (folder / "traceback.txt").read_text()
    assert (folder / path.name).read_text() == NORM
    assert {"python", "machine", "tapeout", "torch-mlir"} <= set(json.loads((folder / "versions.json").read_text()))
    large = tmp_path / "large.mlir"
    large.write_bytes(b" " * (1 << 20))
    assert tapeout("opt", large) == 4 and len([*tmp_path.glob("tapeout-error-*")]) == 2
    assert not [*tmp_path.glob("tapeout-error-*/large.mlir")], "a report is small"
