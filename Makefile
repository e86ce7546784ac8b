# MODEL names a recipe: recipes/$(MODEL).yaml, or any other recipe file.
MODEL  ?= nano
PYTHON ?= python3
ARGS   ?=
RUN    ?= runs/$(basename $(notdir $(MODEL)))
BIN    := .venv/bin
READY  := .venv/.ready
.PHONY: help setup retrofit pair checkpoint report test slow check bench clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */  make \1@/' | column -t -s @

setup: $(READY)  ## a virtual environment in .venv with everything that is needed

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("retrofit needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

retrofit: pair  ## probe, surgery, paired fine-tuning, report and export of MODEL's recipe (default: nano)
	$(BIN)/retrofit export $(RUN) -o $(RUN)/export
	@echo "report: $(RUN)/report.html"

pair: $(READY)  ## the paired fine-tuning and its report; ARGS="train.seeds=[0]" overrides the recipe
	$(BIN)/retrofit pair $(MODEL) -o $(RUN) $(ARGS)

checkpoint: $(READY)  ## surgery and export only, without training: the recipe's model with its QK-Norm
	$(BIN)/retrofit apply recipes/$(MODEL).yaml -o runs/$(MODEL)-checkpoint $(ARGS)

report: $(READY)  ## the report of runs/MODEL again, from its files
	$(BIN)/retrofit report $(RUN)

test: $(READY)  ## the tests
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow and not gpu" $(ARGS)

slow: $(READY)  ## the tests that take longer
	$(BIN)/python -m pytest -n auto --dist loadfile -m "slow and not gpu" $(ARGS)

check: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## what QK-Norm and probing cost a step, what insertion costs accuracy; others in tests/benchmarks say how they are run
	$(BIN)/python tests/benchmarks/step.py
	$(BIN)/python tests/benchmarks/probes.py
	$(BIN)/python tests/benchmarks/calibration.py --nano

clean:  ## remove the environment and what tools left behind; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
