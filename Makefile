# make            what the targets are
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
# a test file stays in one process, so that what its tests share is made once
PARALLEL := -n logical --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup train test test-full lint format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## create .venv and install everything, in the versions of constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: setup ## train the quickstart recipe: a small tool-using agent, on the CPU
	$(RUN) -m smi.train +recipe=quickstart

test: setup ## run the test suite
	$(RUN) -m pytest $(PARALLEL)

test-full: setup ## the same with the slow tests, and many more examples for each property
	$(RUN) -m pytest $(PARALLEL) -m 'not gpu' --hypothesis-profile=full

lint: setup ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

format: setup ## put the code into the house style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove .venv and caches; runs are kept
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
