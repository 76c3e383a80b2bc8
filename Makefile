# Two commands do everything: `make demo` and `make test`. Both create .venv and reuse it.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
BIN := $(VENV)/bin

.PHONY: demo test test-core clean

demo: $(VENV)/.installed
	$(BIN)/jax-extractor train experiments/demo.py --run-dir runs/demo
	$(BIN)/jax-extractor evaluate runs/demo
	$(BIN)/jax-extractor generate runs/demo --prompt "The " --max-tokens 300
	@echo
	@echo "Go on with:"
	@echo "  $(BIN)/jax-extractor generate runs/demo --prompt 'A function ' --temperature 0.7"
	@echo "  $(BIN)/jax-extractor train experiments/lm.py --run-dir runs/mine --data.source files --data.files YOUR.txt"
	@echo "  $(BIN)/jax-extractor cost"

test: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# Pure functions, mixers and models alone.
test-core: $(VENV)/.installed-$(EXTRAS)
	$(BIN)/pytest -m core

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-$(EXTRAS): setup.cfg pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build *.egg-info
