"""What Slurm starts on a node becomes the agent, and is told how others reach it."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.slurm import address, task
from orchestrator.backends.slurm.task import AgentTask
from orchestrator.seams import Completed

SIGNALS = (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[str], Mapping[str, str]]]]:
    """The agents that were to be: arguments and environment of each."""
    begun: list[tuple[list[str], Mapping[str, str]]] = []

    def main(argv: list[str], environ: Mapping[str, str]) -> int:
        begun.append((argv, environ))
        return 7

    monkeypatch.setattr("orchestrator.agent.__main__.main", main)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    out = [os.dup(1), os.dup(2)]
    yield begun
    for number, handler in before.items():
        signal.signal(number, handler)
    for fd, kept in enumerate(out, 1):
        os.dup2(kept, fd)
        os.close(kept)


def a_task(run_dir: Path) -> AgentTask:
    return AgentTask(run_dir=str(run_dir), launch=3, devices=2, agent_timeout=5.0)


@pytest.mark.parametrize(("node", "leads"), [("0", True), ("1", False), (None, False)])
def test_the_first_node_leads_and_the_agents_code_is_the_tasks(
    agents: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: str | None,
    leads: bool,
) -> None:
    for name in ("SLURM_NODEID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    if node is not None:
        monkeypatch.setenv("SLURM_NODEID", node)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setattr(address, "resolve", lambda name: "10.0.0.7")
    with pytest.raises(SystemExit) as left:
        a_task(tmp_path)()
    assert left.value.code == 7
    ((argv, _),) = agents
    assert ("--lead" in argv) == leads
    assert {"--host=node7", "--address=10.0.0.7", "--launch=3", "--devices=2"} <= set(argv)
    assert "--restarts=0" in argv
    assert (tmp_path / "logs" / "agent-node7.log").exists()


def test_submitits_handlers_are_gone_before_the_agent_sets_its_own(
    agents: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setattr(address, "resolve", lambda name: "10.0.0.7")
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    argv = [f"--run-dir={tmp_path}", "--launch=3", "--devices=2", "--agent-timeout=5"]
    with pytest.raises(SystemExit):
        task.main(argv)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN, signal.SIG_IGN]
    ((words, _),) = agents
    assert "--restarts=2" in words
    assert "--lead" not in words, "an agent that is started again never leads"


def test_a_name_that_means_loopback_is_asked_of_slurm_and_of_the_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Completed(0, "NodeName=node7 NodeAddr=10.0.0.7 State=IDLE\n", "")
    monkeypatch.setattr(address, "resolve", lambda name: "127.0.1.1")
    monkeypatch.setattr(task, "run_command", lambda argv, timeout: said)
    towards: list[list[str]] = []

    def routed(hosts: list[str]) -> str:
        towards.append(hosts)
        return "10.9.9.9"

    monkeypatch.setattr(address, "routed_towards", routed)
    environ = {"SLURM_JOB_NODELIST": "node[6-8]"}
    assert task._address("node7", environ) == "10.0.0.7"
    assert towards == [["node6", "node8"]], "not the way to itself"

    def silent(argv: list[str], timeout: float) -> Completed:
        raise TimeoutError

    monkeypatch.setattr(task, "run_command", silent)
    assert task._address("node7", environ) == "10.9.9.9"


def test_a_host_that_nobody_can_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: None)
    monkeypatch.setattr(address, "routed_towards", lambda hosts: None)
    monkeypatch.setattr(task, "run_command", lambda argv, timeout: Completed(1, "", "down"))
    with pytest.raises(OSError, match="node7, the name of this host, means nothing here"):
        task._address("node7", {})


@pytest.mark.parametrize(
    ("environ", "own", "interface"),
    [
        ({}, "127.0.1.1", "ib0"),
        ({}, "10.0.0.7", None),
        ({"GLOO_SOCKET_IFNAME": "bond0"}, "127.0.1.1", "bond0"),
        ({"TP_SOCKET_IFNAME": "bond0"}, "127.0.1.1", None),
    ],
)
def test_gloo_is_told_its_interface_where_it_would_take_another(
    environ: dict[str, str], own: str, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "resolve", lambda name: own)
    monkeypatch.setattr(address, "interface_of", lambda reached: "ib0")
    assert task._for_gloo(environ, "10.0.0.7").get("GLOO_SOCKET_IFNAME") == interface
