"""Verifies the checksums of a checkpoint; each rank checks a part of the files."""

from pathlib import Path

import torch.distributed as dist

from ndctl.rank.checkpoint_files import damage, read_marker, shares
from orchestrator.contract.files.env import RankEnv
from trainer.rank.ranks import broadcast_from_rank0


def verify_on_all_ranks(folder: Path, env: RankEnv) -> str | None:
    """The first defect in a file of the complete checkpoint `folder`, the same on every rank.

    A checkpoint of an old version without checksums has no defects.
    """
    marker = broadcast_from_rank0(lambda: read_marker(folder))
    checksums: dict[str, str] = marker.get("sha256", {})
    sizes = {name: marker["files"][name] for name in checksums}
    found = damage(folder, checksums, shares(sizes, env.world_size)[env.rank])
    defects: list[str | None] = [None] * env.world_size
    dist.all_gather_object(defects, found)
    return next((defect for defect in defects if defect), None)
