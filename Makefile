# `make serve ARGS="--port 8080"` serves; see `make help`.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?=
export PYTHON
VENV := .venv/bin

.PHONY: help setup serve test test-all conformance check format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12

setup:  ## install what the lock files name into .venv, development tools included
	@.ci/setup dev

serve:  ## serve the embedded model, or what ARGS names
	@.ci/setup run
	@exec $(VENV)/minedraft serve $(ARGS)

test: setup  ## run the tests but the slow ones, those with an engine beside the others; ARGS go to pytest
	@$(VENV)/python -m pytest -m "not slow" -n 2 $(ARGS)

test-all: setup  ## run every test
	@$(VENV)/python -m pytest $(ARGS)

conformance: setup  ## run other people's clients against the server; ARGS name some
	@$(VENV)/python -m tests.clients.run $(ARGS)

check: setup  ## format, lint, types, import rules, locks, containers, shell, YAML
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .
	@$(VENV)/python -m mypy
	@$(VENV)/lint-imports --no-logo
	@$(VENV)/python .ci/check_locks.py
	@$(VENV)/hadolint Dockerfile
	@$(VENV)/shellcheck .ci/run .ci/setup deploy/make-secrets
	@$(VENV)/yamllint --strict .
	@$(VENV)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml
	@$(VENV)/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml

format: setup  ## format, and repair what ruff can
	@$(VENV)/ruff check --fix-only --quiet .
	@$(VENV)/ruff format .

clean:  ## remove .venv and the tools' caches
	rm -rf .venv .venv-clients build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
