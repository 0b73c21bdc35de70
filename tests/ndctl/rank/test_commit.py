"""Completing and removing checkpoints, with plain files."""

import json
from pathlib import Path

import pytest

from ndctl.rank.checkpoint_files import MARKER, Written, checksum, commit, partial_name, remove_old
from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import Trained, newest_complete, trained
from orchestrator.contract.spec.model_spec import LoraSpec

SHARD = "__0_0.distcp"
TRAINED = Trained(
    config={"model_type": "llama", "hidden_size": 64},
    lora=LoraSpec(rank=4),
    seed=1,
    global_batch_size=8,
    sequence_length=64,
)


def save(checkpoints: Path, step: int, attempt: int = 1) -> None:
    partial = checkpoints / partial_name(step, attempt)
    partial.mkdir(parents=True)
    (partial / SHARD).write_text("shard")
    files = {SHARD: Written(5, checksum(partial / SHARD))}
    commit(partial, files, {"trained": encode(TRAINED)}, step=step, attempt=attempt, world_size=1)


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.iterdir()}


def test_a_committed_checkpoint_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 5)
    assert newest_complete(tmp_path) == (tmp_path / "step-5", ())
    marker = json.loads((tmp_path / "step-5" / MARKER).read_text())
    sha256 = {SHARD: checksum(tmp_path / "step-5" / SHARD)}
    rest = {"step": 5, "attempt": 1, "world_size": 1, "files": {SHARD: 5}}
    assert marker == {**rest, "sha256": sha256, "trained": encode(TRAINED)}
    assert trained(tmp_path / "step-5") == TRAINED


@pytest.mark.parametrize("found", [None, "shar"])
def test_missing_or_changed_files_are_never_committed(tmp_path: Path, found: str | None) -> None:
    """For example, a rank wrote to a disk that rank 0 does not see."""
    partial = tmp_path / partial_name(5, 1)
    partial.mkdir()
    if found is not None:
        (partial / SHARD).write_text(found)
    with pytest.raises(OSError, match=SHARD):
        commit(partial, {SHARD: Written(5, "")}, step=5, attempt=1, world_size=1)
    assert newest_complete(tmp_path)[0] is None


def test_a_torn_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "__7_0.distcp").write_text("torn")
    save(tmp_path, 5)
    assert newest_complete(tmp_path)[0] == tmp_path / "step-5"
    assert not (tmp_path / "step-5" / "__7_0.distcp").exists()


def test_the_newest_complete_checkpoints_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-40").mkdir()
    (tmp_path / partial_name(35, 1)).mkdir()
    (tmp_path / "notes").mkdir()
    remove_old(tmp_path, 30, 2)
    assert names(tmp_path) == {"step-20", "step-30", "step-40", "notes"}


def test_one_checkpoint_per_keep_interval_is_kept_for_ever(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
        remove_old(tmp_path, step, keep=1, keep_every=20)
    assert names(tmp_path) == {"step-20", "step-40", "step-50"}


def test_a_job_resumed_from_an_older_step_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    """The checkpoints of steps 80 and 90 are damaged. They must not count as the newest."""
    for step in (10, 80, 90, 20, 30):
        save(tmp_path, step)
    remove_old(tmp_path, 30, 2)
    assert names(tmp_path) == {"step-20", "step-30", "step-80", "step-90"}


def test_without_a_complete_checkpoint_only_leftovers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    (tmp_path / partial_name(4, 1)).mkdir()
    remove_old(tmp_path, 5, 1)
    assert names(tmp_path) == {"step-3"}
