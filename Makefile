# Two commands do everything on a fresh machine: `make run` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

RESOLUTION ?= lowest-direct
VERSIONS := .venv-versions

# Modules are compiled when first imported, and kept: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all lint types doctest unit unit-all browser races docs figures format defects \
    versions clean

# The main job: digits on eight real processes by seven strategies, then a report for the browser.
run: $(INSTALLED)-run
	$(BIN)/matcha demo

# Everything that guards behaviour. What uses one core runs beside what uses the other; the tests use
# both, and build the documentation as `make docs` does. Each is a make of its own, so that one
# installation at a time runs.
test: lint browser
	$(MAKE) $(INSTALLED)-docs
	$(MAKE) --jobs 2 types doctest
	$(MAKE) unit

# And what takes long and guards what nothing else does only elsewhere: fresh environments, Ray,
# Lightning, Transformers, MPI, minutes of kills. CONTRIBUTING.md lists it.
test-all: lint browser
	$(MAKE) $(INSTALLED)-docs
	$(MAKE) $(INSTALLED)-integration
	$(MAKE) --jobs 2 types doctest
	$(MAKE) unit-all

lint: $(INSTALLED)-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)-test
	$(BIN)/mypy

# Not of what needs a package that is not installed: Ray, Lightning, Triton.
doctest: $(INSTALLED)-test
	$(BIN)/python -m pytest --doctest-modules src reproduction -q \
	    $(addprefix --ignore src/matcha/,distributed/integrations wires/gpu.py training/momentum/fused.py)

# Tests of several processes wait for one another for two fifths of their time: three at a time keep two
# cores busy.
UNIT := -m pytest tests -n 3 --dist worksteal
unit: $(INSTALLED)-test $(INSTALLED)-docs
	$(BIN)/python $(UNIT) -m "not long"

unit-all: $(INSTALLED)-test $(INSTALLED)-docs $(INSTALLED)-integration
	$(BIN)/python $(UNIT)

# The report is tested in a real browser: Debian's or Ubuntu's, installed by root and in CI. Nobody
# else is asked for a password: without a browser those tests are skipped with a reason (in CI they fail).
browser:
	@command -v chromium chromium-browser google-chrome > /dev/null || { \
	    if [ "$$(id -u)" = 0 ]; then apt="apt-get"; elif [ -n "$$CI" ]; then apt="sudo -n apt-get"; fi; \
	    if [ -z "$$apt" ] || ! command -v apt-get > /dev/null; then \
	        echo "no browser found: the tests that need one are skipped"; exit 0; fi; \
	    echo "no browser found: installing chromium for the report's tests"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    $$apt update -qq && $$apt install -y -qq --no-install-recommends \
	        chromium fonts-dejavu-core > /dev/null \
	    || echo "could not install chromium: the tests that need it are skipped"; }

# The tests of real workers with naps at random, more at a time than there are cores: finds tests and
# code that need somebody to be first. Before a test of meetings is trusted, run it like this.
races: $(INSTALLED)-test
	JITTER=0.1 OMP_NUM_THREADS=1 PYTHONPATH=tools/jitter \
	    $(BIN)/python -m pytest $(or $(TESTS),tests/distributed) -n 8 --dist worksteal

# One line changed in each of thirty modules: the tests must notice every one (an hour on two cores).
defects: $(INSTALLED)-test
	$(BIN)/python tools/plant_defects.py

docs: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Fill the tables and pictures of README and docs from benchmarks/results/.
figures: $(INSTALLED)-test
	$(BIN)/python tools/figures.py

format: $(INSTALLED)-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The virtual environment is made once; what a target needs is installed again only when the
# dependencies change. `python -m pip`, not `pip`: console scripts break in paths with a space.
$(BIN)/python:
	$(PYTHON) -m venv .venv

EXTRAS_run := torch,plot
EXTRAS_test := test
EXTRAS_docs := docs
EXTRAS_integration := integration
COMPILED := hatch_build.py src/matcha/wires/library.py src/matcha/wires/kernels.c
$(INSTALLED)-%: pyproject.toml constraints.txt $(COMPILED) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
	    --editable ".[$(EXTRAS_$*)]"
	touch $@

# Another Python (PYTHON=3.10) and the oldest versions that pyproject.toml allows, or the newest
# (RESOLUTION=highest). Needs uv and the network; the public CI runs it.
versions:
	uv venv --quiet --clear --python $(PYTHON) $(VERSIONS)
	uv pip install --quiet --compile-bytecode --python $(VERSIONS) --resolution $(RESOLUTION) ".[torch,plot,keys]"
	uv pip install --quiet --compile-bytecode --python $(VERSIONS) pytest pytest-timeout pytest-xdist hypothesis psutil
	PYTHONPATH=src $(VERSIONS)/bin/python -m pytest -n 2 -m "not slow" \
	    tests/test_matchings.py tests/topology tests/plans tests/strategies tests/training tests/zoo tests/wires \
	    tests/simulation tests/distributed tests/cli tests/test_import.py

clean:
	rm -rf src/matcha/wires/kernels-*.so .venv $(VERSIONS) build dist site runs .mypy_cache .pytest_cache .ruff_cache
