# `make help` says what there is. Everything lives in .venv and in $FOREBAY_DATA (default .forebay).

PYTHON ?= python3
BIN := .venv/bin
# EXTRA=cpu or EXTRA=gpu overrides what the machine seems to have.
EXTRA ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test check bench clean

help:  ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup:  ## make .venv, install what this machine needs, prepare the local model (quick when nothing changed)
	@$(PYTHON) ops/prepare.py $(if $(EXTRA),--extra $(EXTRA))

run: setup  ## start the whole platform here; Ctrl-C stops it
	@exec $(BIN)/forebay up

# Two files at a time: most laws wait for processes, not for a processor. A file's tests stay together, with what they start.
test: setup  ## run every test (ARGS='-k name' to choose)
	@$(BIN)/python ops/prepare.py clients
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || { \
		echo "== asking what failed once more, alone (docs/decisions/0014)"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

check: setup  ## lint, format, types, import contracts, security floors: seconds
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m pytest -q -n0 tests/test_security_floors.py

bench: setup  ## run a benchmark (NAME=stream)
	@$(BIN)/forebay bench $(or $(NAME),stream) --json -

clean:  ## remove .venv and caches; keeps the data folder
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.forebay/*' -prune -exec rm -rf {} +
