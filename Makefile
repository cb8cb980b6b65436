# Everything happens in .venv; the only tools needed before are make and Python 3.11 or 3.12.

VENV  := .venv
BIN   := $(VENV)/bin
# The stamp's name is a checksum of what setup depends on, so that a fresh checkout's file times do not matter.
STAMP := $(VENV)/.setup-$(shell cat requirements.txt pyproject.toml scripts/java.py | cksum | cut -d' ' -f1)
PIP   := $(BIN)/python -m pip --disable-pip-version-check
PYTHON ?= python3.11 python3.12 python3
RIGHT := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test soak check fmt lock clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## prepare .venv (does nothing when it is up to date)

demo: setup  ## run the demo
	$(BIN)/whimbrel demo

test: check  ## check, then run all tests: first what needs no Spark
	-@$(BIN)/whimbrel warm
	$(BIN)/pytest -m "not spark" -n auto --dist loadfile
	$(BIN)/pytest -m spark -n 2 --dist loadfile --durations 15

soak: setup  ## what takes hours: power failures, chaos, every phase of every protocol
	WHIMBREL_POWER_FAILURES=200 $(BIN)/pytest tests/power -s
	for seed in 1 2 3 4 5; do $(BIN)/whimbrel chaos --minutes 5 --seed $$seed || exit 1; done
	$(BIN)/whimbrel chaos --every-phase

check: setup  ## lint, formatting, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup  ## format and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lock: setup  ## pin the dependencies of pyproject.toml anew
	$(PIP) install --quiet uv
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --upgrade --python-version 3.11 \
		--generate-hashes --no-emit-index-url --extra dev --output-file requirements.txt pyproject.toml

clean:  ## remove what was built and cached (.venv stays)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	rm -rf spark-warehouse metastore_db derby.log
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): | $(BIN)/python
	@echo "Installing what requirements.txt pins; pyspark alone is 450 MB, so the first time takes a while"
	$(PIP) install --quiet --require-hashes -r requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/python scripts/java.py
	@rm -f $(VENV)/.setup-*
	@touch $@

# The first interpreter of the right version; PYTHON=... chooses another.
$(BIN)/python:
	@for python in $(PYTHON); do \
		"$$python" -c '$(RIGHT)' 2>/dev/null && break; python=; \
	done; \
	if [ -z "$$python" ]; then echo "Whimbrel needs Python 3.11 or 3.12: install one, or make setup PYTHON=/path/to/it" >&2; exit 1; fi; \
	echo "Creating $(VENV) with $$("$$python" --version)"; \
	if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		"$$python" -m venv $(VENV); \
	else \
		tools=$$(mktemp -d); \
		"$$python" -m pip install --quiet --disable-pip-version-check --target "$$tools" virtualenv 2>/dev/null \
			&& PYTHONPATH="$$tools" "$$python" -m virtualenv --quiet $(VENV); \
		status=$$?; rm -rf "$$tools"; \
		if [ $$status -ne 0 ]; then echo "This Python cannot make virtual environments: apt-get install python3-venv, then make setup again" >&2; exit 1; fi; \
	fi
