# Each target makes .venv by itself the first time (and again when the requirements change).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test fuzz lint bench clean

demo: $(READY)
	$(BIN)/python examples/digits.py

test: $(READY)
	$(BIN)/python -m pytest

fuzz: $(READY)
	$(BIN)/python -m pytest tests/test_fuzz.py --hypothesis-profile=fuzz

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[opacus,test,bench,examples]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
