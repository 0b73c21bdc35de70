"""An administrator drains nodes: the job leaves them at once, or trains on them to its end."""

import pytest

from tests.e2e.job import LONG_TIMEOUTS, wait_for
from tests.slurm.e2e.slurm_job import LIMIT_S, SlurmNdctl, hosts_of, incidents

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


REQUEUE_ON_DRAIN = {"cluster__slurm__on_drain": "checkpoint_and_requeue"}


def drain(ndctl: SlurmNdctl, host: str) -> None:
    """Drains `host` and waits until the leader knows; it asks Slurm every 15 s."""
    with ndctl.paused_ranks():
        ndctl.testbed.output_of(
            "scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=a fan is loud"
        )
        wait_for(
            lambda: any(event["host"] == host for event in ndctl.events("HostFlagged")),
            f"word of {host}",
            LIMIT_S,
        )


def test_spares_replace_nodes_that_are_down_and_drained(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    done = ndctl.submit(cluster__spare_hosts="2", **REQUEUE_ON_DRAIN, **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    leader = ndctl.leaders()[0]
    down = next(host for host in hosts_of(ndctl) if host != leader)
    ndctl.testbed.output_of("scontrol", "update", f"NodeName={down}", "State=DOWN", "Reason=a test")
    ndctl.wait_for_step(step=10, attempt=2)
    drained = next(host for host in hosts_of(ndctl) if host != leader)
    drain(ndctl, drained)
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    # A drained host is no incident.
    assert incidents(ndctl) == [("host-lost", down, None)]
    (flagged,) = [one for one in ndctl.events("HostFlagged") if one["host"] == drained]
    assert flagged["reason"].startswith("a fan is loud")
    first, second, third = ndctl.events("TrainingResumed")
    assert first["step"] == 0
    before = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 2]
    assert third["step"] == before[-1] > second["step"], "a checkpoint at the next step boundary"
    assert not {down, drained} & set(hosts_of(ndctl))
    assert ndctl.status()["restarts"] == 1
    job = ndctl.slurm_job()
    assert (job["Restarts"], job["ExcNodeList"]) == ("0", "(null)")
    ndctl.assert_nothing_left()


def test_without_a_spare_a_drained_node_makes_the_job_requeue(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    done = ndctl.submit(**REQUEUE_ON_DRAIN, **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=5)
    drained = hosts_of(ndctl)[0]
    drain(ndctl, drained)
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert incidents(ndctl) == []
    (requeue,) = [action for action in ndctl.actions() if action["kind"] == "Requeue"]
    assert requeue["exclude"] == [drained]
    assert f"{drained} is " in requeue["reason"]
    assert "a fan is loud" in requeue["reason"]
    before = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 1]
    assert ndctl.events("TrainingResumed")[1]["step"] == before[-1]
    assert drained not in ndctl.allocated()
    assert ndctl.status()["restarts"] == 0
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1")
    assert ndctl.testbed.node_state(drained) == "drained"
    ndctl.assert_nothing_left()


def test_by_default_a_job_trains_to_its_end_on_a_node_that_is_drained(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    """Like every other job of Slurm."""
    done = ndctl.submit(**LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    hosts = hosts_of(ndctl)
    drain(ndctl, hosts[1])
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert (incidents(ndctl), ndctl.status()["restarts"]) == ([], 0)
    assert hosts_of(ndctl) == hosts
    assert ndctl.status()["attempt"] == 1
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "0", "(null)")
    assert ndctl.testbed.node_state(hosts[1]) == "drained"
    ndctl.assert_nothing_left()


def test_by_default_a_spare_replaces_a_node_that_is_drained(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    """The ranks stop at the end of a step, which stays in the memory of the nodes."""
    done = ndctl.submit(cluster__spare_hosts="1", checkpoint__memory__every="1", **LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    leader = ndctl.leaders()[0]
    drained = next(host for host in hosts_of(ndctl) if host != leader)
    drain(ndctl, drained)
    ndctl.wait_for_end()

    assert ndctl.losses() == finished.losses()
    assert (incidents(ndctl), ndctl.status()["restarts"]) == ([], 0)
    steps = [metric["step"] for metric in ndctl.metrics()]
    assert steps == list(range(1, len(steps) + 1)), "no step was trained twice"
    before = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 1]
    _, resumed = ndctl.events("TrainingResumed")
    assert resumed["step"] == before[-1]
    on_disk = [event["step"] for event in ndctl.events("CheckpointSaved")]
    assert resumed.get("in_memory", False) == (before[-1] not in on_disk)
    assert drained not in hosts_of(ndctl)
    job = ndctl.slurm_job()
    assert (job["JobState"], job["Restarts"], job["ExcNodeList"]) == ("COMPLETED", "0", "(null)")
    assert ndctl.testbed.node_state(drained) == "drained"
    ndctl.assert_nothing_left()


def test_a_running_job_leaves_a_node_whose_maintenance_begins(
    ndctl: SlurmNdctl, finished: SlurmNdctl
) -> None:
    """Also with the default `on_drain`: during maintenance the node may be switched off."""
    done = ndctl.submit(**LONG_TIMEOUTS)
    assert done.code == 0, done.err
    ndctl.wait_for_step(step=3)
    taken = hosts_of(ndctl)[1]
    reservation = "ReservationName=rack_move"
    with ndctl.paused_ranks():
        ndctl.testbed.output_of(
            *("scontrol", "create", "reservation", reservation, "StartTime=now+30", "Duration=30"),
            *("Users=root", "Flags=MAINT,IGNORE_JOBS", f"Nodes={taken}"),
        )
        wait_for(lambda: ndctl.events("HostFlagged"), "word of the maintenance", LIMIT_S)
    try:
        ndctl.wait_for_end()
    finally:
        ndctl.testbed.output_of("scontrol", "delete", reservation)

    assert ndctl.losses() == finished.losses()
    (flagged,) = ndctl.events("HostFlagged")
    assert (flagged["host"], flagged["reason"]) == (taken, "reservation rack_move")
    (requeue,) = [action for action in ndctl.actions() if action["kind"] == "Requeue"]
    assert requeue["exclude"] == [taken]
    assert (incidents(ndctl), ndctl.status()["restarts"]) == ([], 0)
    assert taken not in ndctl.allocated()
    before = [metric["step"] for metric in ndctl.metrics() if metric["attempt"] == 1]
    assert ndctl.events("TrainingResumed")[1]["step"] == before[-1]
    ndctl.assert_nothing_left()
