# Everything sets itself up: the first target that needs it makes .venv with pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT := out

.PHONY: demo test test-full test-ascend bench check lint types imports docs clean

$(READY): requirements/test.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/test.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# The main job, end to end: a small random checkpoint, compiled for this CPU, completes two prompts.
demo: $(READY)
	$(BIN)/python -m tapeout.models.tiny --seed 0 -o $(OUT)/tiny
	$(BIN)/tapeout compile $(OUT)/tiny --target cpu -o $(OUT)/tiny-cpu
	$(BIN)/tapeout run $(OUT)/tiny-cpu --weights $(OUT)/tiny --prompt "Once upon a time" --prompt "The compiler said" --max-tokens 48 --stats

test: check
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not full and not simulated"

test-full: check
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not simulated"

# Every kernel case through the Ascend compiler and the simulator of its modules: slow, exact, and under way.
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
