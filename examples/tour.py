"""A guided tour, from one op to generated text: `python examples/tour.py`. Prints what each level looks like; takes about half a minute.

Every step is a public function; the test run executes this file.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import tapeout
from tapeout.codegen.lower_to_tile import tile_kernels
from tapeout.compiler.pipeline import graph_pipeline, run
from tapeout.compiler.settings import Settings
from tapeout.dialects import nn
from tapeout.dialects._mlir import func, ir
from tapeout.dialects.define import load_dialects
from tapeout.dialects.format import BF16, Q8
from tapeout.dialects.interpreter import Interpreter
from tapeout.dialects.types import Tensor, to_ir
from tapeout.models.deepseek_v41.config import load_config
from tapeout.models.deepseek_v41.graph import GraphOptions, build_graph
from tapeout.models.tiny import write_tiny
from tapeout.passes.define import text


def show(title: str, body: str, lines: int = 12) -> None:
    """Prints a heading and the first lines of a text."""
    print(f"\n== {title}")
    print("\n".join(line[:150] for line in body.splitlines()[:lines]))


def one_op() -> None:
    """An op has a builder, a verifier, a readable text form, and a meaning that runs on numpy arrays."""
    with ir.Context() as context, ir.Location.unknown():
        load_dialects(context)
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            function = func.FuncOp("quantize_rows", ([to_ir(Tensor((None, 64), BF16))], [to_ir(Tensor((None, 64), Q8))]))
        with ir.InsertionPoint(function.add_entry_block()):
            func.ReturnOp([nn.quantize(function.arguments[0], out=Q8, loc=ir.Location.name("codes"))])
        show("one op in text form", text(module))
        rows = np.linspace(-500.0, 500.0, 128).reshape(2, 64).astype(np.dtype("float32"))
        (codes,) = Interpreter(function).run(rows)
        show("its meaning: codes and one power-of-two scale per 32 columns", f"{codes.codes[0, :8]}\n{codes.scales}")


def one_model(config_path: Path) -> None:
    """The graph in real numbers, after the passes, and as tile kernels."""
    config, settings = load_config(config_path), Settings(max_rows=32, max_sequences=2, max_context=256, block_tokens=16)
    with ir.Context(), ir.Location.unknown():
        module = build_graph(config, GraphOptions(settings.max_sequences, settings.max_context, settings.block_tokens))
        show("the graph: real numbers, nothing rounded", _function(text(module), "@sample"))
        run(module, graph_pipeline(settings, config.text.dspark_block_size))
        show("after the passes: documented numbers, fused, planned", _function(text(module), "@sample"))
        kernels = tile_kernels(module)
        show(f"{len(kernels)} tile kernels; one of them", next(k.text for k in kernels.values() if k.choice.family == "start"), 24)


def _function(module_text: str, name: str) -> str:
    lines = module_text.splitlines()
    first = next(i for i, line in enumerate(lines) if f"func.func public {name}(" in line)
    return "\n".join(lines[first : first + 8])


def generate(folder: Path) -> None:
    """Compile for this processor and complete two prompts: only the artifact and the weights are needed from here on."""
    made = tapeout.compile(folder / "tiny", folder / "artifact", max_rows=32, max_sequences=2, max_context=256, block_tokens=16)
    show("the artifact", "\n".join(sorted(str(p.relative_to(folder)) for p in made.directory.rglob("*") if p.is_file())), 8)
    llm = tapeout.LLM(folder / "artifact", folder / "tiny", drafts=True)
    for output in llm.generate(["Once upon a time", "The compiler"], tapeout.SamplingParams(temperature=0, max_tokens=16)):
        print(repr(output.prompt), "->", list(output.outputs[0].token_ids))
    llm.close()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder, "tiny"), seed=0)
        one_op()
        one_model(Path(folder, "tiny"))
        generate(Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
