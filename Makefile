# Two commands do everything on a bare machine with Python 3.11+ and git: `make run` and `make test`.
PYTHON ?= python3
EXTRAS ?= dev
PYTEST_ARGS ?= -n auto --dist worksteal
# The tests.xml of a run in another environment: what passed there runs again only where packages can change it.
AFTER ?=
VENV := .venv
BIN := $(VENV)/bin
comma := ,
READY := $(VENV)/ready-$(subst $(comma),-,$(EXTRAS))

.PHONY: run test lint witnesses compat dist clean

run: $(READY)            ## every mode on 2 to 8 CPU ranks against the dense model; prints the table
	$(BIN)/shardproof run

test: $(READY) lint      ## style, types, import directions, then the whole suite
	$(BIN)/pytest $(PYTEST_ARGS) $(AFTER:%=--after=%) --junitxml=$(VENV)/tests.xml

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

witnesses: $(READY)      ## every mode on 4 processes: recorder, torch profiler, nsys and closed form on every event of 2 steps
	if nsys=$$(.ci/nsys); then PATH="$$nsys:$$PATH"; fi; \
	$(BIN)/shardproof run --engine pool --profile torch,nsys --profile-steps 1:3 \
	    $(shell $(BIN)/python -c "from shardproof.reference.case.default_cases import plain_cases; from shardproof.reference.language.core import MODES; \
	        print(*(chr(34) + str(plain_cases(mode)[2].but(steps=3)) + chr(34) for mode in MODES))")

# Python:torch; each environment has up to 6 GB.
COMPAT ?= 3.12:2.11.0 3.12:2.12.1 3.12:2.13.0 3.12:2.14.1 3.12:2.15.0 3.11:2.13.0 3.13:2.14.1
COMPAT_TESTS := tests/harness/engines tests/harness/torch_internals tests/harness/threads/test_inproc_calls.py \
    tests/harness/processes/test_torchrun.py tests/harness/programs/test_recorded_programs.py

compat:                  ## the default run and tests of engines under each torch, in .compat/; COMPAT="3.12:2.14.1" for one
	mkdir -p .compat && grep -v '^torch==' constraints.txt > .compat/constraints.txt
	set -e; for pair in $(COMPAT); do \
	    place=.compat/torch-$${pair#*:}-$${pair%:*}; python$${pair%:*} -m venv --clear $$place; \
	    $$place/bin/python -m pip install --quiet --disable-pip-version-check --constraint .compat/constraints.txt \
	        "torch==$${pair#*:}" --editable .; \
	    $$place/bin/shardproof run; $$place/bin/pytest -q -p no:cacheprovider $(COMPAT_TESTS); rm -r $$place; \
	done

dist:                    ## a wheel in dist/, installed into a bare environment that proves a case
	rm -rf dist .dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .dist
	.dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/shardproof-*.whl
	cd .dist && bin/shardproof run "tp=2" "mode=isp tp=2"

# An environment that was made with other extras is made anew, so that it holds nothing else.
$(READY): pyproject.toml constraints.txt
	@echo "installing shardproof and what it needs into $(VENV)/: a few minutes the first time"
	$(PYTHON) -m venv $(VENV) $(if $(filter-out $@,$(wildcard $(VENV)/ready-*)),--clear)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf .venv .venv-peers .compat .dist dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
