"""Ranks of hosts that did not fail keep their processes: they leave the broken collectives and join
the next attempt. Losses are bit for bit those of an undisturbed run."""

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]


def kept(ndctl: Ndctl) -> list[list[str]]:
    """For each attempt the hosts whose ranks outlived it."""
    hosts: dict[int, list[str]] = {}
    for event in ndctl.events("HostStopped"):
        hosts.setdefault(event["attempt"], [])
        if event.get("kept"):
            hosts[event["attempt"]].append(event["host"])
    return [sorted(hosts[attempt]) for attempt in sorted(hosts)]


def test_ranks_of_healthy_hosts_outlive_kills_and_a_hang(ndctl: Ndctl, reference: Ndctl) -> None:
    faults = ("kill:rank=3@step=6", "kill:host=1@step=14", "stop:rank=2@step=21")
    drills = [word for fault in faults for word in ("--drill", fault)]
    done = ndctl.submit(
        "--follow",
        *drills,
        resilience__keep_ranks="true",
        resilience__hang_timeout="5",
        checkpoint__memory__every="1",
    )
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    # Host 1 has the killed rank, then dies, and then has the rank that hangs.
    assert kept(ndctl) == [["host-0"], ["host-0"], ["host-0"], []]
    for attempt in (2, 3, 4):
        log = (ndctl.run_dir / f"logs/attempt-{attempt}/host-0/rank-0.log").read_text()
        assert f"joins attempt {attempt}" in log
    assert_nothing_left(ndctl.run_dir)


def test_ranks_of_a_spare_wait_before_a_host_is_lost(ndctl: Ndctl, reference: Ndctl) -> None:
    done = ndctl.submit(
        "--follow",
        *("--drill", "kill:host=1@step=14"),
        resilience__keep_ranks="true",
        cluster__spare_hosts="1",
        checkpoint__memory__every="1",
    )
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == reference.losses()
    first, second = (
        action["hosts"] for action in ndctl.actions() if action["kind"] == "StartAttempt"
    )
    assert (first, second) == (["host-0", "host-1"], ["host-0", "host-2"])
    for host, rank in (("host-0", 0), ("host-2", 2)):
        log = (ndctl.run_dir / f"logs/attempt-2/{host}/rank-{rank}.log").read_text()
        assert "joins attempt 2" in log
    assert_nothing_left(ndctl.run_dir)
