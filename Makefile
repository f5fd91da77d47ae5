# Two commands do everything on a bare machine with Python 3.11+ and git: `make run` and `make test`.
PYTHON ?= python3
EXTRAS ?= dev
PYTEST_ARGS ?= -n auto
BIN := .venv/bin
comma := ,
READY := .venv/ready-$(subst $(comma),-,$(EXTRAS))

.PHONY: run test lint clean

run: $(READY)            ## every mode on 2 and 4 CPU ranks against the dense model; prints the table
	$(BIN)/shardproof run

test: $(READY) lint      ## style, types, import directions, then the whole suite
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
