# Everything here runs in .venv, which the first target that needs it creates.
#   PYTHON              the interpreter to build .venv from (default: python3.11, else python3 when it is 3.11 or newer)
#   TORCH_VERSION       the torch release (default: the pinned one; another one needs its own line in constraints.txt)
#   TORCH_INSTALL_ARGS  extra arguments for the pip call that installs torch, for instance an --index-url of builds for
#                       your accelerator, or without one. pip's own PIP_* variables are respected as always.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$name"; break; }; done)
TORCH_VERSION ?= 2.13.0
TORCH_INSTALL_ARGS ?=
APT_HINT := apt-get install python3.11 python3.11-venv (or python3 python3-venv where that is 3.11 or newer)
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Two torch threads that spin while they wait starve each other as soon as anything else runs on the cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: help install demo test lint format warm-start clean

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/.installed ## create .venv with trimtab and its development tools

demo: install ## train a small model on this machine and write its report
	$(BIN)/trimtab demo

test: $(VENV)/.installed-oracle ## run the whole test suite, offline
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: install ## check style, types, the direction of imports and the generated reference
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/write_configuration_reference.py --check

format: install ## put code and imports into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

warm-start: install ## rebuild the small model that the demo starts from, as shipped in the package
	OMP_NUM_THREADS=1 $(BIN)/python scripts/build_warm_start.py

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "trimtab needs Python 3.11 or newer and found none; on Debian or Ubuntu: $(APT_HINT)" >&2; \
		exit 1; fi
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$(PYTHON) cannot create virtual environments; on Debian or Ubuntu: $(APT_HINT)" >&2; \
		exit 1; fi
	@$(BIN)/python -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet -c constraints.txt $(TORCH_INSTALL_ARGS) torch==$(TORCH_VERSION)
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-oracle: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev,oracle]'
	@touch $@
