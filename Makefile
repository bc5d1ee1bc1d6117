# Everything sets itself up: the first target that needs it makes .venv with pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(VENV)/.torch
OUT := out

.PHONY: demo test test-full test-ascend bench check lint types imports docs clean

$(READY): requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
	f"found Python {v[0]}.{v[1]}, expected 3.11 to 3.13, which the pinned packages are for: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(TORCH): requirements/train.txt $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/train.txt
	touch $@

# The main job, end to end: the small trained checkpoint, compiled for this CPU, continues three pieces of Python.
demo: $(READY)
	$(BIN)/tapeout compile models/tiny/trained --target cpu -o $(OUT)/trained-cpu
	$(BIN)/tapeout run $(OUT)/trained-cpu --weights models/tiny/trained --prompts examples/prompts.jsonl --max-tokens 96 --temperature 0.7 --seed 1 --workers 1 --spec auto --stats

test: check $(TORCH)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not full and not simulated"

test-full: check $(TORCH)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not simulated"

# Every kernel case, a slice of true width and the tiny model through the Ascend compiler and the simulator of its modules.
test-ascend: check
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m simulated

bench: $(READY)
	$(BIN)/python -m tests.bench

check: lint types imports

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python -m tapeout.compiler.document > docs/ops.md

clean:
	rm -rf $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
