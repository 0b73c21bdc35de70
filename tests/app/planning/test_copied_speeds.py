"""The copy of an ended job in a cluster leaves the same record as its leader."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.app.planning.copied_speeds import remember_speed
from orchestrator.app.planning.plans import Planned, plan_spec
from orchestrator.app.remote import Found, find
from orchestrator.backends.kubernetes.mirror.mirror_paths import REMOTE, folder_of
from orchestrator.contract.codec import encode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.job.stage import Ended
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader.records.speed_writer import write_speed
from orchestrator.load import dump_spec
from orchestrator.plan.training import trainer_config
from orchestrator.speed_history import path_of, recall
from tests.agent.world import TurnedClock, a_job
from tests.leader.writers.test_speed_writer import trained
from tests.plan.history.jobs import EXAMPLES


@pytest.fixture(scope="module")
def planned() -> Planned:
    spec = EXAMPLES / "llama3-8b.yaml"
    return plan_spec(spec, ("cluster.gpu=h100-sxm-80gb",), {}, purpose="predict")


def journalled(run_dir: RunDir, planned: Planned) -> Snapshot:
    """The run directory of a job, or its copy, after some steps."""
    run_dir.make()
    run_dir.spec.write_text(dump_spec(planned.spec))
    with Journal(run_dir.journal, TurnedClock()) as journal:
        job = a_job(Path("/runs/job"), backend="kubernetes", plan=planned.plan, at=1.8e9)
        Supervisor(journal).feed(job)
    trained(run_dir)
    found = read_snapshot(run_dir, 1.8e9)
    assert found is not None
    return found


def over(snapshot: Snapshot) -> Snapshot:
    run = replace(snapshot.seen.run, stage=Ended(since=1.8e9, reason="done", ending="SUCCEEDED"))
    return replace(snapshot, seen=replace(snapshot.seen, run=run))


def test_a_copy_leaves_the_record_of_its_leader_once_the_job_has_ended(
    tmp_path: Path, planned: Planned
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    mirror = RunDir(folder_of(here, "prod", "team", "job"))
    snapshot = journalled(mirror, planned)
    remote = {"context": "in-cluster", "namespace": "team", "kind": "jobset", "job": "job"}
    remote |= {"run_dir": "/runs/job", "python": "python3"}
    (mirror.path / REMOTE).write_text(json.dumps({**remote, "launch": 1}))
    found = find(here, "job", None, {"KUBERNETES_SERVICE_HOST": "127.0.0.1"}, TurnedClock())
    remember_speed(found, snapshot, {})
    assert recall(path_of(here)) == (), "it still trains"
    for _ in range(3):
        remember_speed(found, over(snapshot), {})
    (copied,) = recall(path_of(here))

    run_dir = RunDir(there / "job")
    led = journalled(run_dir, planned)
    config = trainer_config(planned.spec, planned.plan, planned.model_config, "/runs/job")  # type: ignore[arg-type]
    run_dir.trainer_config(1).write_text(json.dumps(encode(config)))
    write_speed(run_dir, over(led).seen.run)
    (written,) = recall(path_of(there))
    assert replace(written, run_dir=copied.run_dir) == copied


def test_a_job_of_this_machine_is_left_to_its_leader(tmp_path: Path, planned: Planned) -> None:
    run_dir = RunDir(tmp_path / "job")
    remember_speed(Found(run_dir), over(journalled(run_dir, planned)), {})
    assert not path_of(tmp_path).exists()
