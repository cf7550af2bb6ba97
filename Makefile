# `make train` and `make test` do everything on a machine that has Python (>= 3.11) and make.
# They use an environment of their own in .venv; `make train ENV=none` uses the current Python as it is.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

ifeq ($(ENV),none)
  RUN := PYTHONPATH=.:$(PYTHONPATH) $(PYTHON)
  READY :=
else
  RUN := $(VENV)/bin/python
  READY := $(STAMP)
endif

.PHONY: train test test-all lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hf]'
	touch $@

train: $(READY)
	$(RUN) examples/train_moe.py $(ARGS)

test: $(READY)
	$(RUN) -m pytest -m "not slow" $(ARGS)

test-all: $(READY)
	$(RUN) -m pytest $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
