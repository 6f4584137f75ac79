# Everything runs in .venv, which the first target that needs it makes. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# MLX needs a backend of its own on Linux: AMEM_BACKEND=cuda12 (or cuda13) takes the place of cpu there.
AMEM_BACKEND ?= cpu
ifeq ($(shell uname -s),Linux)
EXTRAS := $(AMEM_BACKEND),lab,test,bench,docs
else
EXTRAS := lab,test,bench,docs
endif

.DEFAULT_GOAL := help
.PHONY: help test check demo lab notebooks bench figures docs soak clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "amem needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Run: make PYTHON=python3.11 ..." >&2; \
	    exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@

check: $(STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check  ## lint, types and all tests
	$(BIN)/python -m pytest

demo: $(STAMP)  ## the quickstart notebook in two kernels, and a table of what the restart cost
	$(BIN)/python notebooks/demo.py

lab: $(STAMP)  ## JupyterLab on the quickstart notebook
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/quickstart.ipynb

notebooks: $(STAMP)  ## run the lessons and workflows anew, and keep their outputs
	$(BIN)/python notebooks/execute.py $(sort $(wildcard notebooks/*/*.ipynb))

bench: $(STAMP)  ## measure what takes minutes, and write the numbers that README quotes
	$(BIN)/python -m benchmarks

figures: $(STAMP)  ## make the tables and figures of README and docs/ anew from the results that are there
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m benchmarks.readme

docs: $(STAMP)  ## the documentation as a site in out/docs; a warning is an error
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs out/docs
	@echo "written: out/docs/index.html"

soak: $(STAMP)  ## thousands of kills and of flipped bits (an hour); the kills are counted in a result file
	$(BIN)/python -m pytest -m soak
	$(BIN)/python -m benchmarks.soak

clean:  ## remove what make and the tests made, .venv included
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
