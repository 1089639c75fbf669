# Every target brings up what it needs on a machine that has only Python >= 3.10 and pip.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Without byte code every start of vLLM takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
UV := .tools/bin/uv
RUN := $(UV) run --locked
ARGS ?=

.PHONY: help demo test test-quick lint bench clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(UV):
	@echo "installing uv into .tools (once)"
	@PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(PYTHON) -m pip install --quiet --target .tools uv
	@test -x $(UV) || { echo "pip put no uv into .tools; look at what it said above" >&2; exit 1; }

demo: $(UV) ## leak shown on a real engine, fix applied, line goes flat; writes a picture (some 6 GB the first time)
	$(RUN) vllm-kvfix demo $(ARGS)

test: $(UV) lint ## everything: lint, types, unit, contract (25 releases), real engines and receivers
	$(RUN) pytest $(ARGS)

test-quick: $(UV) ## unit tests alone (a minute)
	$(RUN) pytest -m "not contract and not engine and not e2e" $(ARGS)

lint: $(UV) ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: $(UV) ## print every figure that the README claims
	$(RUN) python -m benchmarks $(ARGS)

clean: ## remove what the targets made here (the cache of engines stays, see CONTRIBUTING.md)
	rm -rf .tools .venv dist build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
