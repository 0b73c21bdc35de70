"""Connections of gloo. Beside NCCL they are made on demand (`gpu_defaults`)."""

from pathlib import Path

import pytest

from tests.trainer.launch.tiny_runs import losses_of, tiny, work
from tests.trainer.rank import gloo_worker

ON_DEMAND = {"TORCH_GLOO_LAZY_INIT": "1"}
STORE = 1
"""Connections of a rank to the rendezvous store."""


@pytest.mark.process
def test_on_demand_a_rank_connects_only_to_those_it_exchanges_objects_with(tmp_path: Path) -> None:
    case = {"mesh": {"dp_shard": 2, "tp": 2}}
    (mesh,) = work(tmp_path, 4, [case], worker=gloo_worker.__name__)
    (lazy,) = work(tmp_path, 4, [case], worker=gloo_worker.__name__, env=ON_DEMAND)
    # Each rank: 3 others in the group of all ranks, and 3 in that of checkpoints; 1 in each of dp
    # and tp. Rank 0 also serves the store.
    assert [first for first, _ in mesh[1:]] == [STORE + 3 + 3 + 1 + 1] * 3
    assert [used for _, used in mesh[1:]] == [first for first, _ in mesh[1:]]
    assert [first for first, _ in lazy[1:]] == [STORE] * 3
    # The groups of dp and tp exchange no objects.
    assert max(used for _, used in lazy[1:]) <= STORE + 3 + 3


@pytest.mark.slow
@pytest.mark.process
def test_a_job_with_connections_on_demand_has_the_same_losses_and_resumes(tmp_path: Path) -> None:
    losses = {}
    for name, env in (("mesh", {}), ("lazy", ON_DEMAND)):
        out = tmp_path / name
        config = tiny(
            out, parallel={"dp_shard": 2, "tp": 2}, steps=4, checkpoint={"every_steps": 2}
        )
        work(tmp_path, 4, [{"config": config, "stop_after": 2}, {"config": config}], env=env)
        losses[name] = losses_of(out)
    assert losses["lazy"] == losses["mesh"]
    assert list(losses["lazy"]) == [1, 2, 3, 4]
