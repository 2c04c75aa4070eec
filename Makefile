# make demo    set up .venv, fetch a small real model and let it answer a question
# make test    set up .venv for development, then lint, type check and run every test
# make test-fast, make lint, make clean: parts of it, and the way back
#
# Variables: PYTHON (3.10 or newer), VENV, TORCH (what pip is asked for) and TORCH_INDEX (one more package index, for
# another build of torch: on Linux, PyPI's own build is the one for CUDA and several GB large; pytorch.org names an
# index with a build for the CPU). They count when .venv is made: `make clean` first to change them later.
# ARGS is passed on to pytest: make test ARGS="-k cache -x".

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint $(VENV)/constraints.txt
# A process a core, up to 8, each with the tests of one file at a time.
PARALLEL ?= --numprocesses logical --maxprocesses 8 --dist loadfile
QUESTION := Explain in one sentence what a language model is.

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	@model="$$($(BIN)/python -m litgpt.scripts.demo)" && \
	echo '> $(QUESTION)' && \
	$(BIN)/litgpt generate "$$model" --prompt '$(QUESTION)' --max_new_tokens 100 --temperature 0

test: lint
	@$(BIN)/python -m litgpt.scripts.demo > /dev/null
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(VENV)/.test
	@$(BIN)/python -m pytest -m 'not slow' $(PARALLEL) $(ARGS)

lint: $(VENV)/.test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# Models stay in ~/.cache/litgpt (or $$LITGPT_HOME).
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find litgpt tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The hidden files below mark finished steps: pip runs again only when what it installs from has changed.

$(VENV)/.created:
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# TORCH in place of the line for torch, so that another version can be chosen.
$(VENV)/constraints.txt: constraints.txt $(VENV)/.created
	@{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > $@

# Torch goes first: whatever depends on it then takes this build and does not choose another.
$(VENV)/.torch: $(VENV)/constraints.txt
	@echo "Installing $(TORCH)"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing litgpt"
	@$(PIP_INSTALL) --editable '.[gguf]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need"
	@$(PIP_INSTALL) --editable '.[test]'
	@touch $@
