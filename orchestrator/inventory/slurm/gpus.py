"""Finds the GPUs of a node from Slurm's names for them."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import SLURM_GPUS
from orchestrator.inventory.gpus import GpuTable, tables

TABLE = Path(__file__).with_name("gpus.yaml")


def gpu_table(environ: Mapping[str, str]) -> GpuTable:
    """ndctl's table below the one in the file NDCTL_SLURM_GPUS. Raises SpecError."""
    own = [Path(environ[SLURM_GPUS])] if environ.get(SLURM_GPUS) else []
    return tables((*own, TABLE))
