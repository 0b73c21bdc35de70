"""The table of what Slurm calls a node's GPUs."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.cluster.gpus import GpuTable, tables
from orchestrator.contract.env import SLURM_GPUS

TABLE = Path(__file__).with_name("gpus.yaml")


def gpu_table(environ: Mapping[str, str]) -> GpuTable:
    """Ours, below that of the file which NDCTL_SLURM_GPUS names. Raises SpecError."""
    own = [Path(environ[SLURM_GPUS])] if environ.get(SLURM_GPUS) else []
    return tables((*own, TABLE))
