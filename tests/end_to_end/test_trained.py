"""The trained checkpoint as it ships: whole, small, described by figures that were measured, and better than chance through the compiler."""

import json
from pathlib import Path

import numpy as np
import pytest

from tapeout.compiler.api import compile_path
from tapeout.compiler.settings import Settings
from tapeout.models.deepseek_v41.checkpoint import open_checkpoint
from tapeout.models.deepseek_v41.config import shipped_config
from tapeout.models.deepseek_v41.reference import Reference
from tapeout.models.deepseek_v41.token_map import load_token_map
from tapeout.models.deepseek_v41.tokenizer import load_tokenizer
from tapeout.models.tiny.export import SHARD_BYTES
from tapeout.runtime.artifact import load_artifact
from tapeout.runtime.device import open_device
from tests.bench.greedy import load_programs
from tests.bench.quality import Compiled, code_length, windows
from tests.bench.trained import FIGURES, SHIPPED, kept

CONFIG = shipped_config("tiny-trained")
NAMES = ("trained", "trained without replay")
TEXT = '''
class TestStack(unittest.TestCase):

    def setUp(self):
        self.stack = Stack()

    def test_push(self):
        self.stack.push(1)
        self.assertEqual(len(self.stack), 1)
        with self.assertRaises(ValueError):
            self.stack.push(None)

'''


def test_the_folder_is_whole_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in SHIPPED.iterdir()}
    shards = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    assert sizes.keys() - shards.keys() == {
        "README.md", "config.json", "engram_token_map.json", FIGURES, "log.jsonl", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json"}  # fmt: skip
    assert max(shards.values()) <= SHARD_BYTES
    assert sum(sizes.values()) <= 24_000_000
    own = SHIPPED.parents[1] / "deepseek_v41/config-tiny-trained.json"
    assert (SHIPPED / "config.json").read_bytes() == own.read_bytes()
    assert open_checkpoint(SHIPPED, CONFIG).strays == ()
    log = [json.loads(line) for line in (SHIPPED / "log.jsonl").read_text().splitlines()]
    assert len([entry for entry in log if "loss" in entry]) > 20


def test_the_card_says_what_was_measured() -> None:
    card, figures = (SHIPPED / "README.md").read_text(), kept(SHIPPED / FIGURES)
    assert tuple(sorted(figures)) == NAMES
    for name in NAMES:
        assert "\n".join(figures[name].lines) in card, name
    for word in ("PSF", "CPython 3.11.7", "python -m tapeout.models.tiny.train", "log.jsonl"):
        assert word in card, word


def test_the_figures_keep_the_bounds_of_the_issue() -> None:
    found = kept(SHIPPED / FIGURES)["trained"]
    assert (found.documents, found.size_bytes) == (79, 1_180_827)
    assert found.model <= 0.75 * min(found.gzip_apart, found.gzip_together, found.five_grams)
    assert found.precision.stored <= 1.02 * found.precision.exact
    assert found.keep == CONFIG.text.sliding_window + 12
    assert found.replay.kl <= 0.01
    assert abs(found.replay.loss_change) <= 0.005
    assert found.drafts is not None
    assert found.drafts.mean_accepted >= 2.0
    assert max(found.drafts.calibration_error) <= 0.05


def test_compiled_it_knows_python(tmp_path: Path) -> None:
    """A text that no library has: the compiled program codes it as the reference does, in a quarter of its bits; replay hardly matters."""
    compile_path(SHIPPED, tmp_path / "artifact", Settings(max_rows=128, max_outputs=128, max_sequences=1, max_context=256, buckets=(128,)))
    artifact, tokenizer = load_artifact(tmp_path / "artifact"), load_tokenizer(SHIPPED, CONFIG)
    device = open_device(artifact, 2)
    compiled = Compiled(load_programs(artifact, SHIPPED, device))
    ids = tokenizer.encode(TEXT, add_bos=False)
    cut = list(windows(ids, CONFIG.bos_token_id, 128, 128))
    checkpoint = open_checkpoint(SHIPPED, CONFIG)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    reference = Reference(CONFIG, tensors, token_map=load_token_map(SHIPPED, CONFIG, tokenizer))
    found = code_length(compiled.logits, cut)
    right = code_length(lambda tokens: np.asarray(reference.forward(reference.start(), tokens).logits, np.float32), cut)
    device.close()
    assert found == pytest.approx(right, rel=0.03)
    assert found <= 1.3 * len(TEXT)
