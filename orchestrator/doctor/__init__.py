"""Checks of a Slurm or Kubernetes cluster for `ndctl doctor`. `health/machine.py` checks hosts."""
