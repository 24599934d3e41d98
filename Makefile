# Two commands from nothing: `make train` and `make test`. Each first makes .venv, when it is missing or out of date.
#
#   PYTHON=python3.12 make train                       another interpreter (only where .venv is not made yet)
#   make train ARGS="model=baseline size=tiny"         arguments go to train.py, or to pytest
#   make test JOBS=4                                   test processes
#   make test ARGS="-m nightly"                        larger sizes and samples, as .github/workflows/nightly.yml runs them
#   make docs ARGS=serve                               the documentation, built again whenever a page is saved
#   make paper BOOKS=/path/to/classic-books-eltec      also what the paper's page has on books (docs/results.md names their source)

SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: install train test lint format tables paper docs clean help

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed

# pyright runs on node: its own from PyPI where the machine has none.
NODE := $(if $(shell command -v node),,"pyright[nodejs]")

# The latest step of pip, in one line that is written over.
progress = awk '/^(Collecting|Processing|  Downloading|Installing)/ {sub(/ \(from .*/, ""); printf "\r\033[K  %.76s", $$0; fflush()} END {print ""}'

# uv is faster than pip, but does not read where pip was told to look. Where no GPU is seen, PyTorch's own index has the CPU build: 0.2 GB
# instead of 3.
define install_packages
@set -o pipefail; packages=(-c constraints.txt $(1)); \
if $(BIN)/pip config list | grep -E 'find-links|index-url' >/dev/null; then $(BIN)/python -m pip install "$${packages[@]}" | $(progress); \
elif command -v uv >/dev/null; then uv pip install --python $(BIN)/python --torch-backend auto "$${packages[@]}"; \
else if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi; \
	$(BIN)/python -m pip install "$${packages[@]}" | $(progress); fi
endef

notebooks = find . -name '*.ipynb' -not -path '*/.*'

install: $(STAMP)  ## install into .venv and train nothing

train: $(STAMP)  ## train a small model on a CPU in minutes; ARGS= goes to train.py
	$(BIN)/python train.py $(ARGS)

test: $(STAMP)  ## run the quick tests; ARGS= goes to pytest: -m 'not nightly' runs those of CI, -m nightly those of the night
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow and not nightly' $(ARGS)

lint: $(STAMP)  ## check format, style, imports, types and notebooks, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright
	$(notebooks) -exec $(BIN)/nbstripout --verify {} +

format: $(STAMP)  ## rewrite the files so that lint is content with their format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(notebooks) -exec $(BIN)/nbstripout {} +

tables: $(STAMP)  ## renew the tables between the markers of README.md and docs/, from rows, yamls and the cost model
	$(BIN)/python -m gsm.experiments.rows

on_books = data=folder data.path=$(BOOKS) 'data.files=[books-train-0*,books-test*]' 'data.validation=books-test*' \
	data.validation_sequences=1024

# The miniatures with their first seed. An evening adds two seeds of needles by length; committed rows have three of each.
four_arms = 'arm=[gsm,stages_only,baseline,gated_delta_net]'
define evening
$(BIN)/python train.py experiment=retrieval seeds=1 $(four_arms)
$(BIN)/python train.py experiment=chain seeds=1
$(BIN)/python train.py experiment=overlap seeds=1
endef

# The seeds of docs/paper.md that results/length.csv lacks; its other rows are not trained again.
define evening_on_books
$(BIN)/python train.py experiment=length size=nano name=length arm=transformer 'seeds=[1,2]' $(on_books)
endef

# What does not fit into an evening: about seven hours, on books four more.
define days
$(BIN)/python train.py experiment=chain seeds=3
$(BIN)/python train.py experiment=overlap seeds=3
$(BIN)/python train.py experiment=retrieval seeds=3
$(BIN)/python train.py experiment=length size=nano name=length_code 'arm=[gsm,baseline,windows_only,transformer]' seeds=3
$(BIN)/python train.py experiment=ablate_cot seeds=3
endef
define days_on_books
$(BIN)/python train.py experiment=length size=nano name=length 'arm=[gsm_no_yarn,baseline_no_yarn]' seeds=3 $(on_books)
$(BIN)/python train.py experiment=ablate_indexer name=indexer global_batch=16 'arm=[random_topk,dense]' seeds=3 $(on_books)
$(BIN)/python train.py experiment=convolved name=convolved 'arm=[gsm,baseline]' seeds=3 $(on_books)
endef

# With a GPU: speed at the paper's size, and the first step up of its main training, minutes. Nobody has tried it.
gpu = $(shell nvidia-smi -L 2>/dev/null)
speed = logs/$(if $(gpu),gpu,cpu)-paper.md
define on_gpu
$(BIN)/python train.py experiment=paper_main size=tiny
endef

# docs/paper.md with your runs in place of committed rows of the same arm and seed. docs/ stays as it is: a run notes whether a file of
# the repository has changed.
define paper_page
@mkdir -p logs
@sed -E 's#\]\(([a-z_]+\.(md|png))#](../docs/\1#g' docs/paper.md > logs/paper.md
$(BIN)/python -m gsm.experiments.rows logs/paper.md logs=logs
endef

paper: $(STAMP)  ## the paper in miniature, an evening on two cores: logs/paper.md; goes on after Ctrl-C; ARGS=all: 7 hours more
	test -e $(speed) || $(BIN)/python benchmark.py benchmark=paper $(if $(gpu),benchmark.size=1p5b,device=cpu benchmark.size=nano) output=$(speed)
	$(evening)
	$(paper_page)
	$(BIN)/python train.py experiment=retrieval seeds=3 $(four_arms)
	$(if $(gpu),$(on_gpu))
	$(if $(BOOKS),$(evening_on_books))
	$(if $(filter all,$(ARGS)),$(days))
	$(if $(filter all,$(ARGS)),$(if $(BOOKS),$(days_on_books)))
	$(paper_page)
	@echo "the paper in miniature: logs/paper.md"

# What mkdocs finds is this environment's: the extension in docs/ by the import path, formatters of signatures in .venv/bin.
docs: .venv/.docs  ## build the documentation into site/, the notebooks executed; ARGS=serve shows it while you write
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build --quiet --strict)
	@echo "open site/index.html; for the search, which needs a server: make docs ARGS=serve, then http://127.0.0.1:8000"

.venv/.docs: $(STAMP)
	@echo "installing the extra docs into .venv, once; then the notebooks are executed: some minutes"
	$(call install_packages,-e '.[docs]')
	@touch $@

clean:  ## remove .venv and the caches; logs/ stays
	rm -rf .venv .pytest_cache .ruff_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## say what there is
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or name it: PYTHON=python3.12 make ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "$(PYTHON) is Python %d.%d, and GSM needs 3.11 or newer; name one: PYTHON=python3.12 make ..." % sys.version_info[:2])'
	@echo "installing into .venv, once: some 150 packages, 2.8 GB on disk; 2 to 7 minutes, by network and load"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=24'
	$(call install_packages,-e '.[dev]' $(NODE))
	@touch $@
