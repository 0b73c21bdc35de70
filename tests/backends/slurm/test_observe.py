from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from orchestrator.backends.slurm import observe
from orchestrator.backends.slurm.observe import SlurmJob

CAPTURED = Path(__file__).parent / "captured"


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def captured_jobs() -> tuple[SlurmJob, ...]:
    return observe.parse_jobs((CAPTURED / "job-22.05.txt").read_text(), UTC)


def test_a_job_is_read_whatever_its_comment_says() -> None:
    running = captured_jobs()[0]
    assert running == SlurmJob(
        id="1",
        state="RUNNING",
        name="j.sh",
        nodes=("node1", "node2"),
        requeues=True,
        exit_code="0:0",
        ends_at=at("2027-11-22T02:04:01"),
        limit_at=at("2027-11-22T02:04:01"),
        comment="ndctl launch 1 of /tmp/x y;",
        command="/tmp/tb/j.sh",
    )


def test_a_job_that_completes_says_by_its_restarts_whether_it_was_requeued_or_cancelled() -> None:
    _, requeued, cancelled = captured_jobs()
    assert observe.cause(requeued, 0, at("2026-11-22T02:09:12"), 90) == "requeued"
    assert observe.cause(cancelled, 0, at("2026-11-22T02:09:21"), 90) == "cancelled"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"state": "RUNNING"}, "unknown"),
        ({"state": "RUNNING", "ends_at": 1080.0}, "time-limit"),
        ({"state": "RUNNING", "ends_at": 1100.0}, "unknown"),
        ({"state": "RUNNING", "preempted": True}, "preempted"),
        ({"state": "PREEMPTED"}, "preempted"),
        ({"state": "TIMEOUT"}, "time-limit"),
        ({"state": "COMPLETING", "ends_at": 1000.0, "limit_at": 1000.0}, "time-limit"),
        ({"state": "COMPLETING", "ends_at": 900.0, "limit_at": 1000.0}, "cancelled"),
        ({"state": "CANCELLED"}, "cancelled"),
        ({"state": "PENDING"}, "requeued"),
        ({"state": "REQUEUE_HOLD"}, "requeued"),
        ({"state": "NODE_FAIL"}, "unknown"),
    ],
)
def test_why_a_run_ends(change: dict[str, object], cause: str) -> None:
    job = replace(SlurmJob(id="1", state="?", restarts=2), **change)  # type: ignore[arg-type]
    assert observe.cause(job, 2, 1000.0, 90.0) == cause


def test_a_state_that_nobody_knows_is_not_the_end() -> None:
    assert SlurmJob(id="1", state="SOMETHING_NEW").meaning == "running"
    assert not SlurmJob(id="1", state="SOMETHING_NEW").is_over


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("JobHeldUser", "held"),
        ("launch_failed_requeued_held", "held"),
        ("launch failed requeued held", "held"),
        ("Resources", "queued"),
    ],
)
def test_a_held_job_is_one_that_a_person_must_let_go(reason: str, meaning: str) -> None:
    job = SlurmJob(id="7", state="PENDING", reason=reason)
    assert job.meaning == meaning
    assert ("scontrol release 7" in observe.advice(job)) == (meaning == "held")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:node[3-4]", "sinfo -R"),
        ("ReqNodeNotAvail,_May_be_reserved_for_other_job", "sinfo -R"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_"
         "partitions", "sinfo -R"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
         "partitions", "sinfo -R"),
        ("InvalidAccount", "cluster.slurm.account"),
        ("InvalidQOS", "cluster.slurm.qos"),
        ("PartitionTimeLimit", "cluster.slurm.time"),
        ("BadConstraints", "ndctl cancel"),
        ("Dependency", "another job"),
        ("DependencyNeverSatisfied", "never be met"),
    ],
)  # fmt: skip
def test_what_a_person_can_do_about_a_job_that_waits(reason: str, said: str) -> None:
    assert said in observe.advice(SlurmJob(id="7", state="PENDING", reason=reason))


def test_a_reason_without_advice_has_none() -> None:
    assert observe.advice(SlurmJob(id="7", state="PENDING", reason="SomethingElse")) == ""


def test_the_queue_is_read_with_bars_in_the_comment() -> None:
    text = "1|RUNNING|None|/tmp/j.sh|ndctl launch 1 of /x; a|b\n2|PENDING|Resources|/t|(null)\n\n"
    first, second = observe.parse_queue(text)
    assert (first.id, first.reason, first.comment) == ("1", "", "ndctl launch 1 of /x; a|b")
    assert (second.state, second.reason, second.comment) == ("PENDING", "Resources", "")


def test_accounting_has_a_line_for_each_run_of_a_job() -> None:
    text = (
        "12|NODE_FAIL|0:0|2026-11-22T02:00:00|node[1-2]\n"
        "12|CANCELLED by 0|0:15|2026-11-22T03:00:00|node[3-4]\n"
        "12.batch|CANCELLED|0:15|2026-11-22T03:00:00|node3\n"
        "13|PENDING|0:0|Unknown|None assigned\n"
    )
    first, second, third = observe.parse_accounting(text, UTC)
    assert (first.state, first.nodes) == ("NODE_FAIL", ("node1", "node2"))
    assert (second.state, second.exit_code) == ("CANCELLED", "0:15")
    assert second.ends_at == at("2026-11-22T03:00:00")
    assert (third.nodes, third.ends_at) == ((), None)


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("", ()),
        ("node1", ("node1",)),
        ("node[1-3]", ("node1", "node2", "node3")),
        ("n[008-010,12]", ("n008", "n009", "n010", "n12")),
        ("a[1-2]-ib[0,3],b", ("a1-ib0", "a1-ib3", "a2-ib0", "a2-ib3", "b")),
    ],
)
def test_host_lists_expand(names: str, hosts: tuple[str, ...]) -> None:
    assert observe.expand(names) == hosts


def test_switches_are_named_from_the_outermost_down() -> None:
    text = (CAPTURED / "topology-22.05.txt").read_text()
    assert observe.parse_switches(text, ["node1", "node9"]) == {"node1": ("spine", "leaf1")}


def test_a_block_is_the_one_switch_of_its_nodes() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4\n"
    assert observe.parse_switches(text, ["n2"]) == {"n2": ("b1",)}


def test_a_node_is_read() -> None:
    (node,) = observe.parse_nodes((CAPTURED / "nodes-22.05.txt").read_text())
    assert (node.name, node.states, node.reason) == ("node1", ("ALLOCATED",), "")
    assert (node.address, node.gpus, node.partitions) == ("127.0.1.1", 2, ("train",))


@pytest.mark.parametrize(
    ("state", "states"),
    [
        ("MIXED+DRAIN", ("MIXED", "DRAIN")),
        ("DOWN*+DRAIN", ("DOWN", "DRAIN", "NOT_RESPONDING")),
        ("DOWN+NOT_RESPONDING", ("DOWN", "NOT_RESPONDING")),
    ],
)
def test_the_flags_of_a_node_count_as_states(state: str, states: tuple[str, ...]) -> None:
    line = f"NodeName=n1 Gres=(null) State={state} Reason=bad fan [root@2026-11-22T02:23:08]\n"
    (node,) = observe.parse_nodes(line)
    assert (node.states, node.reason, node.gpus) == (states, "bad fan", 0)


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:2", 2), ("gpu:a100:4(S:0-1),nvme:2", 4), ("gpu:a:2,gpu:b:2", 4), ("shard:8", 0)],
)
def test_gpus_are_counted(gres: str, count: int) -> None:
    assert observe.gpus_in(gres) == count


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("60", 60),
        ("1:30", 1.5),
        ("2:00:00", 120),
        ("1-0", 1440),
        ("1-12:30", 2190),
        ("365-00:00:00", 525_600),
        ("UNLIMITED", None),
        ("INFINITE", None),
    ],
)
def test_times_are_minutes(time: str, minutes: float | None) -> None:
    assert observe.minutes(time) == minutes


def test_a_partition_is_read() -> None:
    (train,) = observe.parse_partitions((CAPTURED / "partitions-22.05.txt").read_text())
    assert (train.name, train.is_default, train.state) == ("train", True, "UP")
    assert (train.max_time_min, train.max_nodes, train.nodes) == (None, None, 2)
