# Two commands from nothing: `make train` and `make test`. Each first makes .venv, when it is missing or out of date.
#
#   PYTHON=python3.12 make train                       another interpreter (only where .venv is not made yet)
#   make train ARGS="model=baseline size=tiny"         arguments go to train.py, or to pytest
#   make test JOBS=4                                   test processes
#   make docs ARGS=serve                               the documentation, built again whenever a page is saved
#   make gpu STAGE=smoke ARGS="only=attend"            on a machine with a GPU, with its own Python; no .venv, no network

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: train test lint format docs gpu adversary clean help

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

# pyright runs on node: its own from PyPI where the machine has none.
NODE := $(if $(shell command -v node),,"pyright[nodejs]")

# Where no GPU is seen and pip was not told where to look, PyTorch's own index has the CPU build: 0.2 GB instead of 3.
CPU_INDEX := https://download.pytorch.org/whl/cpu
use_cpu_index = [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null \
	&& ! $(BIN)/pip config list | grep -E 'find-links|index-url' >/dev/null

notebooks = find . -name '*.ipynb' -not -path '*/.*'

train: $(STAMP)  ## train a small model on a CPU in minutes; ARGS= goes to train.py
	$(BIN)/python train.py $(ARGS)

test: $(STAMP)  ## run the tests that are not slow; ARGS= goes to pytest, and ARGS="-m ''" runs all
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow' $(ARGS)

lint: $(STAMP)  ## check format, style, types and notebooks, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(notebooks) -exec $(BIN)/nbstripout --verify {} +

format: $(STAMP)  ## rewrite the files so that lint is content with their format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(notebooks) -exec $(BIN)/nbstripout {} +

# What mkdocs finds is this environment's: the extension in docs/ by the import path, formatters of signatures in .venv/bin.
docs: .venv/.docs  ## build the documentation into site/, without a warning or not at all; ARGS=serve shows it while you write
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --quiet --strict)
	@echo "open site/index.html, or read it on http://127.0.0.1:8000 with: make docs ARGS=serve"

.venv/.docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

gpu:  ## measure on a GPU in stages of 3 to 8 minutes: STAGE=smoke, tests, kernels, inference or training; no .venv needed
	$(PYTHON) benchmarks/gpu.py $(STAGE) $(ARGS)

adversary: $(STAMP)  ## attack the project with cases drawn from seeds: ARGS="cases=2000 seed=0", or ARGS="class=2 seed=123"
	PYTHONPATH=tests $(BIN)/python -m adversary $(ARGS)

clean:  ## remove .venv and the caches; logs/ stays
	rm -rf .venv .gpu .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## say what there is
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or name it: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d, and GSM needs 3.11 or newer; name one: PYTHON=python3.12 make ..." % sys.version_info[:2])'
	@test -x $(BIN)/python || { echo "making .venv: a minute or two, once"; $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	@if $(use_cpu_index); then export PIP_EXTRA_INDEX_URL=$(CPU_INDEX); fi; \
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]' $(NODE)
	@touch $@
