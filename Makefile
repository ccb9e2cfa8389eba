# What is done here, by name: `make` lists it. Everything runs in .venv, which `make setup` makes: `PYTHON=python3.13`.
PYTHON ?= python3
BIN := .venv/bin
# How many tests run at once, and what else pytest is told: `make fast ARGS="-x tests/consumer"`.
JOBS ?= 4
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup lock test fast lint format types contracts limits docs bench bank console build ci

help: ## list what can be made
	@sed -n 's/^\([a-z]*\): .*## /\1	/p' $(MAKEFILE_LIST) | while IFS='	' read -r name what; do printf '%-10s %s\n' "$$name" "$$what"; done

setup: ## a virtual environment with all that tests need, of the versions in requirements.lock
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --progress-bar off --constraint requirements.lock --editable '.[test]'

lock: ## write requirements.lock anew, with the newest libraries that pyproject.toml allows
	rm -rf build/lock && $(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet '.[test]'
	{ sed -n '/^#/p' requirements.lock; build/lock/bin/pip freeze | grep -v '^outbox-postgres'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock && rm -rf build/lock

fast: ## the fast tier of the tests
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile -m fast $(ARGS)

test: ## all tests: real PostgreSQL, real kills, real races
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile $(ARGS)

lint: ## style, and the form of the files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: ## mend what the style can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: ## the types, strictly
	$(BIN)/mypy

contracts: ## who may import whom
	$(BIN)/lint-imports

limits: ## lower the limits of what has become smaller (tests/house/limits.toml)
	$(BIN)/python -m tests.house.limits

docs: ## the documentation as a site, in build/site
	$(BIN)/python docs/make.py

bench: ## the benchmarks, against hand-written rivals
	$(BIN)/python -m benchmarks $(ARGS)

bank: ## the bank transfer from end to end, with kills and damaged tables
	$(BIN)/outbox demo --crash --faults

console: ## two banks that stay open, with the admin console over them
	$(BIN)/outbox demo --console

build: ## the wheel and the source distribution, in dist
	$(BIN)/python -m hatchling build

ci: ## all that must hold before a change lands, in an environment of its own
	.ci/run
