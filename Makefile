# make demo       run a training job on this machine; one rank is killed and the job recovers
# make test       run lint, types, import layers and all tests except the slow ones
#                 (the tests need Slurm and a Kubernetes API server: as root on Debian 12 the first
#                 run installs the one and builds the other, 3 to 5 minutes; elsewhere the last
#                 lines of the output name the tests that did not run)
# make test-all   the same with the slow tests, which takes many hours
# make test-part PART=3/20   only the slow tests of the third of twenty parts
# make check      only lint, types and import layers
# make format     format the code and fix what ruff can fix
# make docs       build the documentation site in build/site; a broken link is an error
# make install    install ndctl with the tested versions in .venv
# make testbed-slurm       start a small Slurm cluster on this machine
# make testbed-kubernetes  start a Kubernetes control plane on this machine; pods are processes
# make clean      remove .venv and build/
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEV_READY := .venv/.ready-dev
# The order of the tests is that of tests/conftest.py. Three workers on two cores, because tests of
# schedulers mostly wait.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

# If it were set, each worker of pytest would compile all tests again, and each process of a job all of ndctl.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
SLURM_TESTBED := slurm/testbed/slurm_testbed.sh

# pip compiles the 19,000 files of the packages one after the other, for a minute and a half; this
# uses all cores. Tests need a quarter of them, so there Python compiles what it imports.
COMPILE = $(BIN)/python -m compileall -qq -j 0 .venv/lib || true
test test-all test-part check lint format docs: COMPILE = true

.PHONY: help install demo docs testbed-slurm testbed-kubernetes test test-all test-part lint check format clean control-plane compiled-tests

help:
	@sed -n "s/^\# \(make \|   \)/\1/p" Makefile

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ndctl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@$(COMPILE)
	@touch $(READY)

# requirements-dev.lock holds every line of requirements.lock, and the tools of the tests.
$(DEV_READY): $(READY) requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-compile --requirement requirements-dev.lock
	@touch $(DEV_READY)

install: $(READY)

demo: $(READY)
	$(BIN)/ndctl submit examples/quickstart.yaml --new --follow --drill kill:rank=1@step=25

docs: $(DEV_READY)
	$(BIN)/python -m mkdocs build --strict

testbed-slurm: $(DEV_READY)
	@$(SLURM_TESTBED) play

testbed-kubernetes: $(DEV_READY)
	@manifests/testbed/kube_envtest.sh >/dev/null
	@$(BIN)/python -m tests.kubernetes.local_cluster start

lint: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

check: lint
	$(BIN)/mypy

# On a new machine this uses the core that pip leaves idle. If make is interrupted, it goes on, and
# the next run finds its result. A build that fails is tried again by the tests, which say why.
control-plane:
	@nice manifests/testbed/kube_envtest.sh </dev/null >/dev/null 2>&1 &

# Compiles the tests, with their assertions rewritten, once: each worker would do it for itself.
# What cannot be imported is told by the run that follows.
COLLECT := $(BIN)/python -m pytest --collect-only --quiet
compiled-tests: $(DEV_READY)
	@$(COLLECT) tests/[a-j]* >/dev/null 2>&1 & $(COLLECT) tests/[k-z]* >/dev/null 2>&1; wait

# mypy runs as a test (tests/repository/test_types.py): it uses one core for a minute and a half.
test: control-plane lint compiled-tests
	$(PYTEST) --randomly-seed=1 -m "not slow and not gpu"

test-all: control-plane lint compiled-tests
	$(PYTEST) --hypothesis-profile=explore -m "not gpu"

PART ?= 1/20
test-part: control-plane lint compiled-tests
	$(PYTEST) -m "slow and not gpu" --part $(PART)

format: $(DEV_READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info
