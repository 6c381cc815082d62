# Every target sets up $(VENV) first, once; a change of pyproject.toml sets it up again.
VENV ?= .venv
PYTEST_ARGS ?=
STAMP := $(VENV)/.mtpkit-setup

.PHONY: help setup demo test test-all test-newest test-lowest test-wheel test-gpu lint docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile

setup: $(STAMP) ## make the virtual environment

$(STAMP): pyproject.toml tools/setup.sh
	@VENV=$(VENV) tools/setup.sh

demo: $(STAMP) ## train MTP heads on the tiny base, convert them, measure the speedup
	@$(VENV)/bin/mtpkit demo

test: $(STAMP) ## run the first and the last case of each test, few of them with processes
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal --tier fast $(PYTEST_ARGS)

test-all: $(STAMP) ## run all tests that need no GPU
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

test-newest: $(STAMP) ## run some of the tests with the newest dependencies, Python 3.13 where there is one
	@VENV=$(VENV) tools/setup.sh newest
	@OMP_NUM_THREADS=1 $(VENV)/newest/bin/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS) @tests/bounds.txt

test-lowest: $(STAMP) ## run the same tests with the oldest dependencies that pyproject.toml admits
	@VENV=$(VENV) tools/setup.sh lowest
	@OMP_NUM_THREADS=1 $(VENV)/lowest/bin/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS) @tests/bounds.txt

test-wheel: $(STAMP) ## install a wheel into an empty environment and decode there (minutes)
	@rm -rf outputs/wheel
	@$(VENV)/bin/uv build --quiet --python $(VENV)/bin/python --out-dir outputs/wheel
	@$(VENV)/bin/uv venv --quiet --python $(VENV)/bin/python outputs/wheel/env
	@$(VENV)/bin/uv pip install --quiet --python outputs/wheel/env/bin/python outputs/wheel/*.whl
	@cd outputs/wheel && env/bin/mtpkit generate --model ../../examples/tiny_base/model --max-tokens 8 "import os"

test-gpu: $(STAMP) ## run the tests that need a GPU
	@$(VENV)/bin/python -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, imports between packages, and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/mypy

docs: $(STAMP) ## build the pages and the API reference into outputs/docs
	@$(VENV)/bin/uv venv --quiet --allow-existing --python $(VENV)/bin/python $(VENV)/docs
	@$(VENV)/bin/uv pip install --quiet --python $(VENV)/docs/bin/python --group docs
	@$(VENV)/docs/bin/mkdocs build --strict

clean: ## remove caches and outputs, keep the virtual environment
	rm -rf outputs build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
