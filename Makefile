# Two commands do everything on a fresh machine: `make run` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

RESOLUTION ?= lowest-direct
VERSIONS := .venv-versions

# Modules are compiled when first imported, and kept: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test lint types doctest unit browser races docs figures format versions clean

# The main job: digits on eight real processes by seven strategies, then a report for the browser.
run: $(STAMP)
	$(BIN)/matcha demo

# What uses one core runs beside what uses the other; the tests use both.
test: lint
	$(MAKE) --jobs 2 types doctest docs
	$(MAKE) unit

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

doctest: $(STAMP)
	$(BIN)/python -m pytest --doctest-modules src reproduction -q

unit: $(STAMP)
	$(BIN)/python -m pytest tests -n 2 --dist worksteal

# The report is tested in a real browser. Without one those tests are skipped with a reason (in CI they
# fail): this installs Debian's or Ubuntu's.
browser:
	@command -v chromium chromium-browser google-chrome > /dev/null || { \
	    echo "no browser found: installing chromium for the report's tests"; \
	    apt="apt-get"; [ "$$(id -u)" = 0 ] || apt="sudo -n apt-get"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    $$apt update -qq && $$apt install -y -qq --no-install-recommends \
	        chromium fonts-dejavu-core > /dev/null \
	    || echo "could not install chromium: the tests that need it are skipped"; }

# The tests of real workers with naps at random, more at a time than there are cores: finds tests and
# code that need somebody to be first. Before a test of meetings is trusted, run it like this.
races: $(STAMP)
	JITTER=0.1 OMP_NUM_THREADS=1 PYTHONPATH=tools/jitter \
	    $(BIN)/python -m pytest $(or $(TESTS),tests/distributed) -n 8 --dist worksteal

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Fill the tables and pictures of README and docs from benchmarks/results/.
figures: $(STAMP)
	$(BIN)/python tools/figures.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The virtual environment is made once and again only when the dependencies change.
# `python -m pip`, not `pip`: console scripts break in paths with a space.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

# Another Python (PYTHON=3.10) and the oldest versions that pyproject.toml allows, or the newest
# (RESOLUTION=highest). Needs uv and the network; the public CI runs it.
versions:
	uv venv --quiet --clear --python $(PYTHON) $(VERSIONS)
	uv pip install --quiet --compile-bytecode --python $(VERSIONS) --resolution $(RESOLUTION) ".[torch,plot,keys]"
	uv pip install --quiet --compile-bytecode --python $(VERSIONS) pytest pytest-timeout pytest-xdist hypothesis psutil
	PYTHONPATH=src $(VERSIONS)/bin/python -m pytest -n 2 -m "not slow" \
	    tests/topology tests/matchings tests/plans tests/strategies tests/training tests/zoo tests/wires \
	    tests/simulation tests/distributed tests/cli tests/test_import.py

clean:
	rm -rf .venv $(VERSIONS) build dist site runs .mypy_cache .pytest_cache .ruff_cache
