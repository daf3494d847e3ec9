# Every target makes its own environment first; `make test` needs only Python 3.11+, make and git.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
BIN := .venv/bin
ARGS ?=

.PHONY: demo test bench crash format clean

demo: .venv/ready
	@$(BIN)/walkback demo $(ARGS)

test: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q --numprocesses auto --dist loadfile $(ARGS)

# Every crash layer at length, then every mutant: some 23 minutes on two cores. ARGS=--help says more.
crash: .venv/ready
	@PYTHONPATH=tests $(BIN)/python -m crash $(ARGS)

bench: .venv/ready
	@PYTHONPATH=tests $(BIN)/python benchmarks/bench.py $(ARGS)

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "walkback needs Python 3.11 or newer: put one on PATH, or run make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
