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
# On all cores, a file on one, in their order: by their number of tests those with engines would come last, and alone. The
# contract tests have processes of their own, and say their seed in the end.
SIDE_BY_SIDE := -n logical --dist loadfile --no-loadscope-reorder

.PHONY: help demo test test-quick lint bench gpu-check clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(UV):
	@echo "installing uv into .tools (once)"
	@PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(PYTHON) -m pip install --quiet --target .tools uv
	@test -x $(UV) || { echo "pip put no uv into .tools; look at what it said above" >&2; exit 1; }

demo: $(UV) ## a real engine leaks, is named on a live page, is fixed while it runs (some 6 GB the first time)
	$(RUN) vllm-kvfix demo $(ARGS)

test: $(UV) lint ## everything: lint, types, unit, contract (25 releases), real engines and receivers
ifeq ($(ARGS),)
	$(RUN) pytest $(SIDE_BY_SIDE) -m "not contract and not alone"
	$(RUN) pytest -m "contract or alone"
else
	$(RUN) pytest $(ARGS)
endif

test-quick: $(UV) ## unit tests alone (three minutes)
	$(RUN) pytest $(SIDE_BY_SIDE) -m "not contract and not engine and not e2e" $(ARGS)

lint: $(UV) ## ruff and mypy
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

bench: $(UV) ## print every figure that the README claims
	$(RUN) python -m benchmarks $(ARGS)

# Without network, what is there must do: the environment, or of it pynvml alone, which is one file, or the system's.
gpu-check: export PYTHONPATH := sidecar:$(firstword $(wildcard .venv/lib/python3*/site-packages))
gpu-check: ## compare what is told of GPU memory with a live CUDA process ("Error 3": no GPU here)
	@python=.venv/bin/python; $$python -c 'import pynvml' 2>/dev/null || python=$(PYTHON); \
	$$python -m vllm_kvfix_sidecar.gpu_check

clean: ## remove what the targets made here (the cache of engines stays, see CONTRIBUTING.md)
	rm -rf .tools .venv dist build demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  sidecar/vllm_kvfix_sidecar/page/vendor
