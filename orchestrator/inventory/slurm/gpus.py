"""The table of what Slurm calls a node's GPUs."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.contract.files.env import SLURM_GPUS
from orchestrator.inventory.gpus import GpuTable, tables

TABLE = Path(__file__).with_name("gpus.yaml")


def gpu_table(environ: Mapping[str, str]) -> GpuTable:
    """Ours, below that of the file which NDCTL_SLURM_GPUS names. Raises SpecError."""
    own = [Path(environ[SLURM_GPUS])] if environ.get(SLURM_GPUS) else []
    return tables((*own, TABLE))
