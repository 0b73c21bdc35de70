"""Drills: which rank runs one at which step, and how they are read."""

import pytest

from orchestrator.contract.drills import parse_drill
from orchestrator.contract.files.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.rank.drills import drills_due, read_drills


def test_a_drill_runs_on_its_rank_at_its_step() -> None:
    drills = [parse_drill("kill:rank=3@step=5", 1), parse_drill("kill:host=1@step=5", 2)]

    def due(rank: int, step: int) -> list[int]:
        env = RankEnv(rank=rank, local_rank=rank % 2, local_world_size=2)
        return [drill.id for drill in drills_due(drills, env, step)]

    assert [due(rank, 5) for rank in range(4)] == [[], [], [2], [1]]
    assert due(3, 4) == due(3, 6) == []


def test_drills_are_read_as_json_and_invalid_text_is_refused() -> None:
    text = '[{"id": 2, "fault": "stop", "target": "rank", "index": 0, "step": 9}]'
    assert [str(drill) for drill in read_drills(text)] == ["stop:rank=0@step=9"]
    for invalid in ("[", "{}", '[{"id": 1}]'):
        with pytest.raises(TrainingError, match="NDCTL_DRILLS"):
            read_drills(invalid)
