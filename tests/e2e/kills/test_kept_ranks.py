"""Ranks of hosts that did not fail keep their processes: they leave the broken collectives and join
the next attempt. Losses are bit for bit those of an undisturbed run."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]


def kept(ndctl: Ndctl) -> list[list[str]]:
    """For each attempt the hosts whose ranks outlived it."""
    hosts: dict[int, set[str]] = {}
    for event in ndctl.events("HostStopped"):
        hosts.setdefault(event["attempt"], set())
        if event.get("kept"):  # reported again if the order to stop comes later
            hosts[event["attempt"]].add(event["host"])
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


# In every run the test above has the ranks that stay, and test_warned_hosts.py the spare host.
@pytest.mark.slow
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


MESHES: Mapping[str, Mapping[str, str]] = {
    "tp": {"parallel__tp": "2"},
    "pp and cp": {"parallel__pp": "2", "parallel__cp": "2"},
    "replicas": {"parallel__dp_replicate": "2"},
    "compile": {"train__compile": "true"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_join_again_and_again_on_every_axis(ndctl: Ndctl, tmp_path: Path, mesh: str) -> None:
    options = {**MESHES[mesh], "checkpoint__memory__every": "1"}
    undisturbed = Ndctl(tmp_path / "whole")
    done = undisturbed.submit("--follow", **options)
    assert done.code == 0, done.out + done.err
    drills = [
        word for step in (4, 8, 12, 16, 20) for word in ("--drill", f"kill:rank=3@step={step}")
    ]
    done = ndctl.submit("--follow", *drills, resilience__keep_ranks="true", **options)
    assert done.code == 0, done.out + done.err
    assert ndctl.losses() == undisturbed.losses()
    assert kept(ndctl) == [*[["host-0"]] * 5, []]
    assert_nothing_left(ndctl.run_dir)
