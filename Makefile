# make demo   a training job that loses a rank and goes on, on this machine
# make install  ndctl with the tested versions, in .venv
# make test   lint, types, import layers, and all tests but the slow ones, on a real Slurm and a real
#             Kubernetes API server as well: as root on Debian 12 the one is installed and the
#             other built (once, 3 to 5 minutes); where there is none, the end says loudly which
#             tests were not run
# make test-all  the slow ones, too
# make check  the first three of these
# make testbed-kubernetes  a Kubernetes control plane on this machine, whose pods are processes,
#             to play with; builds it once, in a cache outside the checkout
# make testbed-slurm  a small Slurm cluster on this machine, to play with
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# In the order that tests/conftest.py gives them.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

.DEFAULT_GOAL := help
SLURM_TESTBED := slurm/testbed/slurm_testbed.sh

.PHONY: help install demo testbed-slurm testbed-kubernetes test test-all check format clean

help:
	@sed -n "s/^\# //p" Makefile

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ndctl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

install: $(READY)

demo: $(READY)
	$(BIN)/ndctl submit examples/quickstart.yaml --new --follow --drill kill:rank=1@step=25

testbed-slurm: $(READY)
	@$(SLURM_TESTBED) play

testbed-kubernetes: $(READY)
	@manifests/testbed/kube_envtest.sh >/dev/null
	@$(BIN)/python -m tests.kubernetes.play start

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(PYTEST) --randomly-seed=1 -m "not slow and not gpu"

test-all: check
	$(PYTEST) --hypothesis-profile=explore -m "not gpu"

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info
