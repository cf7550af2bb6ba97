# `make train` and `make test` do everything on a machine that has Python (>= 3.11) and make.
# They use an environment of their own in .venv; `make train ENV=none` uses the current Python as it is.
PYTHON ?= python3
VENV := .venv
CORE := $(VENV)/.core
FULL := $(VENV)/.full
WORKERS ?= 2
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check

ifeq ($(ENV),none)
  RUN := PYTHONPATH=.:$(PYTHONPATH) $(PYTHON)
  READY_CORE :=
  READY_FULL :=
else
  RUN := $(VENV)/bin/python
  READY_CORE := $(CORE)
  READY_FULL := $(FULL)
endif

.PHONY: train test test-slow test-all lint format clean

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e .
	touch $@

$(FULL): $(CORE)
	$(PIP) -c constraints.txt -e '.[dev,hf,jax]'
	touch $@

train: $(READY_CORE)
	$(RUN) examples/train_moe.py $(ARGS)

test: $(READY_FULL)
	$(RUN) -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

test-slow: $(READY_FULL)
	$(RUN) -m pytest -n $(WORKERS) -m slow $(ARGS)

test-all: test test-slow

lint: $(READY_FULL)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(READY_FULL)
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
