# `make train` and `make test` work on a fresh machine: both first make .venv and install into it.
#   PYTHON=python3.12      the interpreter of the virtual environment
#   PIP_ARGS="..."         more arguments for pip, such as an index with CPU-only builds of torch
#   ARGS="..."             more arguments for the command itself, such as ARGS="--training.steps 100"

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help train test lint bench bench-data parity clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(STAMP) ## train qwen3_moe for 20 steps into outputs/debug, afresh
	rm -rf outputs/debug
	$(BIN)/python -m hyper_parallel.train --model_spec qwen3_moe --training.steps 20 --dump_folder outputs/debug $(ARGS)

test: $(STAMP) ## run the whole test suite
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## ruff, import floors, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(STAMP) ## measure the figures of the README
	$(BIN)/python -m benchmarks $(ARGS)

bench-data: $(STAMP) ## measure how fast data are prepared and read
	$(BIN)/python -m benchmarks prepare_data indexed_samples $(ARGS)

parity: $(STAMP) ## compare every combination of parallelisms with one process, over 50 steps
	$(BIN)/python -m benchmarks.parity $(ARGS)

clean: ## remove .venv, caches and outputs/debug
	rm -rf $(VENV) outputs/debug build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is younger than what it was made from, so nothing is installed twice.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; $(PYTHON) is " + sys.version.split()[0] + ". Set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@
