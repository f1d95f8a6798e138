# `make help` lists the targets. Everything runs in .venv, which `make setup` makes and keeps.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
.DEFAULT_GOAL := help
# Without compiled files every process that a test starts would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

setup: $(STAMP) ## make .venv and install, with the versions in constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); \
	  sys.exit(None if ok else f"Python {sys.version.split()[0]} found, 3.11 to 3.13 needed: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

gpu-kit: $(STAMP) ## gpu-kit/ for benchmarks/run_gpu.sh on a GPU machine without a network
	$(BIN)/python -m benchmarks.kit make gpu-kit

check: $(STAMP) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# There are as many processes as cores, so each has one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# All but `long` and `slow` follow from a test's fixtures: tests/support/plugin.py.
LEFT_OUT := process or dist or cluster or browser or interpreter or long or slow

test: check ## check, then the tests that start no processes, and a few that do; 5 minutes on 2 cores
	$(PYTEST) -m 'smoke or not ($(LEFT_OUT))'

test-all: $(STAMP) ## all but test-slow (gloo, SLURM, a browser, no GPU, no network); REST=1 without those of test
	$(PYTEST) -m 'not slow$(if $(REST), and not smoke and ($(LEFT_OUT)))'

test-slow: $(STAMP) ## grids of cases, and what takes power, network and time from SLURM clusters
	$(PYTEST) -m slow

fmt: $(STAMP) ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: $(STAMP) ## raw text to an exported encoder, a rank killed on the way; CORPUS=path for your text
	$(BIN)/python -m launch demo $(if $(CORPUS),--corpus '$(CORPUS)')

docs: $(STAMP) ## the pages of docs/ as a site, in site/; a warning is an error
	$(BIN)/python -m mkdocs build --quiet

IMAGE := docker build --build-arg REVISION="$$(git describe --always --dirty --abbrev=40)"
image: ## container image for CPUs
	$(IMAGE) --tag postnorm .

image-cuda: ## container image for NVIDIA GPUs
	$(IMAGE) --build-arg VARIANT=cuda --tag postnorm:cuda .

clean: ## remove .venv, runs, site and caches
	rm -rf $(VENV) runs site .mypy_cache .pytest_cache .ruff_cache

.PHONY: help setup gpu-kit check test test-all test-slow fmt demo docs image image-cuda clean
