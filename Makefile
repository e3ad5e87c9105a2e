# `make demo` and `make test` set everything up by themselves, in .venv and .cache.
# Needed beforehand: Python 3.10 or newer with venv, make, a C++ compiler, a package index.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# torch compiles DeepSpeed's C++ operations with the first ninja on PATH, and rebuilds all of them when
# another version of it answers: it has to be the one in the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where the compiled operations are kept between runs.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet -c constraints.txt
# Removes the locks of builds that were killed: torch would wait for them for ever.
CLEAR_LOCKS := $(BIN)/python -m tests.op_builds

.PHONY: help demo test test-quick test-long matrix matrix-half lint format docs pictures bench device clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# DeepSpeed comes as source only, and its build must see the torch that it will run with. Hence torch
# first, then DeepSpeed without an isolated build environment, which might bring another torch along.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy ninja setuptools wheel hatchling
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[dev,frameworks]'
	@touch $@

demo: $(STAMP)  ## probe this machine, then train a small GPT with what was chosen
	@$(CLEAR_LOCKS)
	$(BIN)/python examples/train_gpt.py

test: lint  ## lint, type check and the tests
	@$(CLEAR_LOCKS)
	$(BIN)/python -m pytest -q -m 'not matrix and not long'

test-quick: lint  ## lint, type check and the tests that take no seconds and train nothing
	$(BIN)/python -m pytest -q -m 'not slow and not long and not matrix'

test-long: $(STAMP)  ## the tests that take long: launchers, eight ranks, whole scripts, properties on drawn examples
	@$(CLEAR_LOCKS)
	$(BIN)/python -m pytest -q -m 'long and not matrix and not hypothesis'
	AUTOTUNE_OFFLOAD_TEST_EXAMPLES=300 $(BIN)/python -m pytest -q -m 'hypothesis and not matrix'

matrix: $(STAMP)  ## train on ten versions of DeepSpeed, with and without path and fused step: about 40 minutes
	@$(CLEAR_LOCKS)
	$(BIN)/python -m tests.matrix

matrix-half: $(STAMP)  ## the same on five of them, as CI does
	@$(CLEAR_LOCKS)
	$(BIN)/python -m tests.matrix --half

lint: $(STAMP)  ## ruff, mypy and the floors of the house over the whole tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## rewrite in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the documentation as a site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

pictures: $(STAMP)  ## every picture of README.md and docs/ anew; screenshots need a Chromium
	$(BIN)/python docs/draw.py

bench: $(STAMP)  ## what the README claims, measured here
	@$(CLEAR_LOCKS)
	$(BIN)/python -m benchmarks.choice
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.startup

# Its python is another than $(BIN)'s where that has a torch which sees no accelerator: docs/devices.md.
device:  ## with an accelerator: everything that only a device can show, in eight minutes
	python="$$($(PYTHON) -m benchmarks.device.environment .venv-device)" && "$$python" -m benchmarks.device $(DEVICE_OPTIONS)

clean:  ## back to a fresh clone
	rm -rf $(VENV) .venv-device .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
