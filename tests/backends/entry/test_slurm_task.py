"""The task that Slurm starts on a node: its address, its hooks, and its agent."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.entry import slurm_task
from orchestrator.backends.slurm.on_nodes import address
from orchestrator.seams import Completed

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[str], Mapping[str, str]]]]:
    """Arguments and environment of each agent that a task starts."""
    started: list[tuple[list[str], Mapping[str, str]]] = []

    def main(argv: list[str], environ: Mapping[str, str]) -> int:
        started.append((argv, environ))
        return 7

    monkeypatch.setattr("orchestrator.backends.entry.agent.main", main)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    out = [os.dup(1), os.dup(2)]
    yield started
    for number, handler in before.items():
        signal.signal(number, handler)
    for fd, copy in enumerate(out, 1):
        os.dup2(copy, fd)
        os.close(copy)


def task_args(run_dir: Path, *more: str) -> list[str]:
    return [f"--run-dir={run_dir}", "--launch=3", "--devices=2", "--agent-timeout=5", *more]


@pytest.mark.parametrize(
    ("more", "node", "leads"),
    [
        ({"SLURM_NODEID": "0"}, ["--first-leads"], True),
        ({"SLURM_NODEID": "1"}, ["--first-leads"], False),
        ({"SLURM_NODEID": "0"}, [], False),  # replaced: the only task of its step
    ],
)
def test_the_first_node_leads_and_the_task_exits_with_the_agents_code(
    agents: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, str],
    node: list[str],
    leads: bool,
) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: "10.0.0.7")
    with pytest.raises(SystemExit) as exited:
        slurm_task.main(task_args(tmp_path, *node), {"SLURMD_NODENAME": "node7", **more})
    assert exited.value.code == 7
    ((argv, _),) = agents
    assert ("--lead" in argv) == leads
    assert {"--host=node7", "--address=10.0.0.7", "--launch=3", "--devices=2"} <= set(argv)
    assert "--restarts=0" in argv
    assert (tmp_path / "logs" / "agent-node7.log").exists()


def test_a_run_directory_that_was_moved_away_is_not_created_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_task.log_to(tmp_path / "job" / "logs" / "agent-node7.log")
    assert list(tmp_path.iterdir()) == []
    assert "logging here" in capsys.readouterr().err


def test_a_warning_signal_before_the_agents_handlers_is_ignored(
    agents: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: "10.0.0.7")
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit):
        slurm_task.main(
            task_args(tmp_path), {"SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "node7"}
        )
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN, signal.SIG_IGN]
    ((argv, _),) = agents
    assert "--restarts=2" in argv


def test_a_loopback_address_is_replaced_by_that_of_slurm_or_of_the_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = Completed(0, "NodeName=node7 NodeAddr=10.0.0.7 State=IDLE\n", "")
    monkeypatch.setattr(address, "resolve", lambda name: "127.0.1.1")
    monkeypatch.setattr(slurm_task, "run_command", lambda argv, timeout: output)
    towards: list[list[str]] = []

    def routed(hosts: list[str]) -> str:
        towards.append(hosts)
        return "10.9.9.9"

    monkeypatch.setattr(address, "routed_towards", routed)
    environ = {"SLURM_JOB_NODELIST": "node[6-8]"}
    assert slurm_task._address("node7", environ) == "10.0.0.7"
    assert towards == [["node6", "node8"]], "the route to the node itself is loopback"

    def time_out(argv: list[str], timeout: float) -> Completed:
        raise TimeoutError

    monkeypatch.setattr(slurm_task, "run_command", time_out)
    assert slurm_task._address("node7", environ) == "10.9.9.9"


def test_a_host_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: None)
    monkeypatch.setattr(address, "routed_towards", lambda hosts: None)
    monkeypatch.setattr(slurm_task, "run_command", lambda argv, timeout: Completed(1, "", "down"))
    with pytest.raises(OSError, match="cannot resolve the name of this host, node7"):
        slurm_task._address("node7", {})


@pytest.mark.parametrize(
    ("environ", "own", "interface"),
    [
        ({}, "127.0.1.1", "ib0"),
        ({}, "10.0.0.7", None),
        ({"GLOO_SOCKET_IFNAME": "bond0"}, "127.0.1.1", "bond0"),
        ({"TP_SOCKET_IFNAME": "bond0"}, "127.0.1.1", None),
    ],
)
def test_gloo_gets_its_interface_if_it_would_choose_another(
    environ: dict[str, str], own: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: own)
    monkeypatch.setattr(address, "interface_of", lambda reached: "ib0")
    assert slurm_task._for_gloo(environ, "10.0.0.7").get("GLOO_SOCKET_IFNAME") == interface


def run_task(
    agents: list[Any], run_dir: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> list[str]:
    """Run a task with its hooks; returns the arguments of its agent."""
    (run_dir / "logs").mkdir(exist_ok=True)
    monkeypatch.setattr(address, "resolve", lambda name: "10.0.0.7")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exited:
        slurm_task.main(task_args(run_dir, *more), {**os.environ, "SLURMD_NODENAME": "node7"})
    signal.signal(signal.SIGTERM, handler)
    assert exited.value.code == 7, "the exit code of the agent, even if a hook fails"
    argv: list[str] = agents[-1][0]
    return argv


@pytest.mark.process
def test_hooks_run_before_the_agent_and_after_it(
    agents: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = ("--before=echo $NDCTL_HOST in $NDCTL_RUN_DIR", "--before-limit=20")
    after = ("--after=echo cleaned; exit 3", "--after-limit=20")
    argv = run_task(agents, tmp_path, monkeypatch, *before, *after)
    assert {"--leader-late=20.0", "--hook-failed="} <= {*argv}
    output = (tmp_path / "logs" / "hooks-node7.log").read_text()
    assert f"node7 in {tmp_path}\n" in output
    assert output.endswith("cleaned\n")
    assert "after hook failed on node7: exited with code 3; output: cleaned" in caplog.text


@pytest.mark.process
def test_an_agent_reports_why_the_hook_of_its_host_failed(
    agents: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ("--before=echo no /scratch; exit 9", "--before-limit=20")
    argv = run_task(agents, tmp_path, monkeypatch, *before)
    assert "--hook-failed=exited with code 9; output: no /scratch" in argv


def test_without_hooks_the_agent_starts_at_once(
    agents: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = run_task(agents, tmp_path, monkeypatch)
    assert {"--leader-late=0", "--hook-failed="} <= {*argv}
    assert not (tmp_path / "logs" / "hooks-node7.log").exists()
