"""Which host keeps the others from talking, from what all said of one small all-reduce. Pure."""

from collections.abc import Mapping, Sequence

from orchestrator.contract.protocol import Checked


def judge(
    hosts: Sequence[str], reports: Mapping[str, Checked], limit: float = 4.0
) -> Mapping[str, str]: ...
