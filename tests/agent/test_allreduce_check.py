"""The all-reduce check between hosts, with real processes and torch on loopback."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest

from orchestrator.agent.allreduce_check import check_fabric, read_checked, render
from orchestrator.agent.evidence.rank_evidence import process_state
from orchestrator.agent.processes.fork_server import Ended
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Checked, CheckFabric
from orchestrator.detect.fabric import judge
from orchestrator.posix.locks import is_free
from orchestrator.system import SystemClock
from tests.agent.world import WAIT_S, LoopClock, run_with_clock, until, wait_for
from trainer.rank.allreduce_check import link_order

HOSTS = ("node1", "node2", "node3")


IMPORTS = ("torch.distributed.launcher.api",)


def a_place(
    folder: Path, host: str, python: str = sys.executable, imports: tuple[str, ...] = ()
) -> HostPlace:
    run_dir = RunDir(folder / "job")
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    return HostPlace(
        python=python,
        run_dir=run_dir,
        host=host,
        address="127.0.0.1",
        socket=folder / "sock",
        parent=os.getpid(),
        imports=imports,
    )


def an_order(rank: int, port: int, timeout_s: float) -> CheckFabric:
    return CheckFabric(
        check=7,
        rank=rank,
        hosts=HOSTS,
        master_address="127.0.0.1",
        master_port=port,
        timeout_s=timeout_s,
    )


def child_of(rank: int, port: int) -> int | None:
    """The pid of the check of one host, below its fork server."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_text()
            if (
                f" trainer.rank.allreduce_check --check=7 --rank={rank} " in title
                and f"--port={port} " in title
            ):
                return int(folder.name)
    return None


def check(folder: Path, timeout_s: float, stopped: int | None = None) -> dict[str, Checked]:
    """Three hosts check their links; `stopped` is the rank that is stopped soon after its start."""
    port = free_port("127.0.0.1")

    places = [a_place(folder, host, imports=IMPORTS) for host in HOSTS]

    async def stop(rank: int) -> None:
        while (pid := child_of(rank, port)) is None:
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGSTOP)

    async def all_hosts() -> list[Checked]:
        standbys = [Standby(place, os.environ) for place in places]
        # The fork servers import torch before the check starts, so its time limit excludes that.
        await asyncio.gather(
            *(standby.try_out(["true"], os.environ, title="", given="") for standby in standbys)
        )
        checks = [
            check_fabric(
                an_order(rank, port, timeout_s), places[rank], standby, os.environ, SystemClock()
            )
            for rank, standby in enumerate(standbys)
        ]
        others = [] if stopped is None else [stop(stopped)]
        reports = await asyncio.gather(*checks, *others)
        await asyncio.gather(*(standby.close() for standby in standbys))
        return [report for report in reports if report is not None]

    reports = {report.host: report for report in asyncio.run(all_hosts())}
    for host in HOSTS:
        lock = RunDir(folder / "job").ranks_lock(host)
        wait_for(partial(is_free, lock), f"the end of all processes of {host}")
    return reports


@pytest.mark.process
def test_three_healthy_hosts_pass_and_none_is_named(tmp_path: Path) -> None:
    reports = check(tmp_path, timeout_s=WAIT_S)
    assert [report.state for report in reports.values()] == ["ok"] * 3
    for host, report in reports.items():
        assert {link.peer for link in report.links} == set(HOSTS) - {host}
        assert all(link.seconds > 0 for link in report.links)
    assert judge(HOSTS, reports, limit=1e9) == {}


@pytest.mark.process
@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_stopped_host_is_named(tmp_path: Path, stopped: int) -> None:
    reports = check(tmp_path, timeout_s=25.0, stopped=stopped)
    bad = HOSTS[stopped]
    unfit = judge(HOSTS, reports)
    assert unfit == {bad: "the check timed out after 25 s"}
    for host in set(HOSTS) - {bad}:
        assert reports[host].state == "waited"
        # A host that reached the first host before its stop cannot tell which host it waits for.
        silent: Collection[tuple[str, ...]] = [(bad,)] if stopped else [(bad,), ()]
        assert reports[host].waited_for in silent


def run_check(place: HostPlace, timeout_s: float) -> Checked:
    order = an_order(0, 1, timeout_s)

    async def run() -> Checked:
        standby = Standby(place, os.environ)
        try:
            return await check_fabric(order, place, standby, os.environ, SystemClock())
        finally:
            await standby.close()

    return asyncio.run(run())


def python_that_runs(folder: Path, program: str) -> str:
    """A fake python that runs the shell command `program` instead of the check."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$3" in\ntrainer.rank.allreduce_check) {program} ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "state", "why"),
    [
        (
            "echo torch is broken >&2; exit 3",
            "broke",
            "the check ended with exit code 3: torch is broken",
        ),
        ("kill -9 $$", "broke", "the check ended with exit code -9: "),
        ("echo nonsense", "broke", "the check ended with exit code 0: "),
        ('echo \'{"check":7,"host":"node1","state":"waited"}\'', "waited", ""),
    ],
)
def test_any_failure_of_the_child_is_reported(
    tmp_path: Path, program: str, state: str, why: str
) -> None:
    report = run_check(
        a_place(tmp_path, "node1", python_that_runs(tmp_path, program)), timeout_s=WAIT_S
    )
    assert (report.host, report.state, report.why) == ("node1", state, why)


@pytest.mark.process
def test_a_child_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    python = python_that_runs(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    place = a_place(tmp_path, "node1", python)

    async def script(clock: LoopClock) -> tuple[Checked, int]:
        standby = Standby(place, os.environ)
        order = an_order(0, 1, WAIT_S)
        checking = asyncio.create_task(check_fabric(order, place, standby, os.environ, clock))
        pid_file = tmp_path / "pid"
        pid = await until(lambda: pid_file.exists() and pid_file.read_text(), "the child")
        clock.put_forward(WAIT_S)
        report = await checking
        await standby.close()
        return report, int(pid)

    report, pid = run_with_clock(script)
    assert (report.state, report.why) == ("broke", "the check timed out after 240 s")
    wait_for(lambda: process_state(pid) in ("gone", "Z"), "the end of the child")


def test_a_missing_python_is_reported(tmp_path: Path) -> None:
    report = run_check(a_place(tmp_path, "node1", str(tmp_path / "none")), timeout_s=WAIT_S)
    assert report.state == "broke"
    assert report.why.startswith("failed to start the check")


def test_the_command_line(tmp_path: Path) -> None:
    argv = render(an_order(2, 23_456, 30.0), a_place(tmp_path, "node3"), until=1234.5)
    assert argv[argv.index("trainer.rank.allreduce_check") :] == [
        "trainer.rank.allreduce_check",
        "--check=7",
        "--rank=2",
        "--address=127.0.0.1",
        "--port=23456",
        "--until=1234.500",
    ]


@pytest.mark.parametrize("text", ["", "\ufffd\n", "{}\n", "3\n"])
def test_unreadable_output_is_no_result(text: str) -> None:
    assert read_checked(Ended(code=0, out=text, err="")) is None


@pytest.mark.parametrize("count", range(2, 20))
def test_links_that_are_tested_at_the_same_time_share_no_host(count: int) -> None:
    """Each link is tested once, and a host tests one link at a time, so no cycle can block."""
    order = link_order(count)
    assert len(order) == len(set(order)) == (count if count > 2 else 1)
    key: Callable[[tuple[int, int]], tuple[bool, int]] = lambda pair: (  # noqa: E731
        count % 2 == 1 and pair[0] == count - 1,
        pair[0] % 2,
    )
    for turn in {key(pair) for pair in order}:
        hosts = [host for pair in order if key(pair) == turn for host in pair]
        assert len(hosts) == len(set(hosts))
