# Two commands do all the set-up: `make demo` and `make test`. The environment is .venv in this folder.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml setup.py constraints.txt src/paragrad/core/kernels.c

.PHONY: demo env test lint chaos slow dist slurm bench clean

demo: .venv/.core
	$(BIN)/paragrad demo

env: .venv/.all

test: .venv/.all lint
	$(BIN)/pytest -m "not chaos and not slow" -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/.all
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

chaos: .venv/.all
	$(BIN)/pytest -m chaos -s

# sdist and wheel, each installed in an empty environment.
slow: .venv/.all
	$(BIN)/pytest -m slow

# The wheel is built from the sdist, so that the sdist is known to be enough.
dist: .venv/.core
	rm -rf dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(BIN)/pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w dist dist/*.tar.gz

# The Slurm of one machine that chaos tries docs/slurm.md on: Debian's packages, as root. Its daemons are not started.
slurm:
	apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge

bench: .venv/.all
	$(PIP) -e '.[bench]' --no-build-isolation
	for name in exchange throughput network straggler memory start stream keras_fit; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/vector.py --device cpu --part models,toy --seconds 2 --out benchmarks/results/vector_cpu.json
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf .venv build dist src/*.egg-info src/paragrad/core/_kernels*.so

.venv/.core: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	touch $@

.venv/.all: .venv/.core
	$(PIP) --no-build-isolation -e '.[test,lint]'
	touch $@
