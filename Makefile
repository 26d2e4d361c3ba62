# Two commands do all the set-up: `make demo` and `make test`. The environment is .venv in this folder.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml setup.py constraints.txt src/paragrad/kernels.c

.PHONY: demo env test lint chaos slurm bench clean

demo: .venv/.core
	$(BIN)/paragrad demo

env: .venv/.all

test: .venv/.all lint
	$(BIN)/pytest -m "not chaos" -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/.all
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

chaos: .venv/.all
	$(BIN)/pytest -m chaos -s

# The Slurm of one machine that chaos tries docs/slurm.md on: Debian's packages, as root. Its daemons are not started.
slurm:
	apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge

bench: .venv/.all
	$(PIP) -e '.[bench]' --no-build-isolation
	for name in exchange throughput network straggler memory start stream keras_fit; do $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/vector.py --device cpu --part models,toy --seconds 2 --out benchmarks/results/vector_cpu.json
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf .venv build src/*.egg-info src/paragrad/_kernels*.so

.venv/.core: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	touch $@

.venv/.all: .venv/.core
	$(PIP) --no-build-isolation -e '.[test,lint]'
	touch $@
