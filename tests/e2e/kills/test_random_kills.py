"""Random processes of a job are killed one by one, then in pairs: the job recovers each time.

No process, partial file or second copy of a rank is left.
"""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left, kill, processes_of, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(3600),
]

SINGLES, PAIRS = 15, 7
SEED = 20261123
ENDLESS = {"train__steps": "100000", "checkpoint__every_steps": "5"}
"""More steps than any machine trains in the time of this test."""
KINDS = {
    "agent": re.compile(r"orchestrator\.backends\.entry\.agent --run-dir="),
    "launcher": re.compile(r"orchestrator\.agent\.processes\.fork_server "),
    "torchrun": re.compile(r"^torchrun of attempt"),
    "keeper": re.compile(r"^orchestrator\.agent\.processes\.rank_watcher of"),
    "rank": re.compile(r"\(rank \d+\) *$"),
}
EXPECTED_COUNTS = {"agent": 2, "launcher": 2, "torchrun": 2, "keeper": 4, "rank": 4}
"""Number of processes of each kind in a training job of 2 hosts x 2 ranks."""


@dataclass(frozen=True)
class Process:
    kind: str
    pid: int


def processes(run_dir: Path) -> tuple[Process, ...]:
    """Processes of the job by kind, without forks that have not set their title yet."""
    return tuple(
        Process(kind, pid)
        for pid, command in processes_of(run_dir).items()
        for kind, title in KINDS.items()
        if title.search(command)
    )


def all_processes_run(found: Iterable[Process]) -> bool:
    kinds = [process.kind for process in found]
    return {kind: kinds.count(kind) for kind in EXPECTED_COUNTS} == EXPECTED_COUNTS


def merge_losses(known: Mapping[int, float], now: Mapping[int, float]) -> dict[int, float]:
    """Losses by step, before and after a kill. A step that was trained twice must have the same
    loss bit by bit. A resume truncates the metrics, so the losses before the kill are kept here."""
    again = known.keys() & now.keys()
    assert {step: known[step] for step in again} == {step: now[step] for step in again}
    return {**known, **now}


def test_a_job_recovers_from_every_kill_and_nothing_is_left(ndctl: Ndctl) -> None:
    draw = random.Random(SEED)
    done = ndctl.submit(**ENDLESS, resilience__max_restarts="100")
    assert done.code == 0, done.out + done.err
    losses: dict[int, float] = {}
    for turn in range(SINGLES + PAIRS):
        wait_for(
            lambda: all_processes_run(processes(ndctl.run_dir)), f"all processes before kill {turn}"
        )
        _wait_for_a_step(ndctl, f"before kill {turn}")
        losses = merge_losses(losses, ndctl.losses())
        before = processes(ndctl.run_dir)
        leader = ndctl.events("LeaderStarted")[-1]["pid"]
        # Without both agents nothing is left that could continue the job.
        pair = turn >= SINGLES
        candidates = [process for process in before if not pair or process.pid != leader]
        victims = draw.sample(candidates, 1 if turn < SINGLES else 2)
        attempt = ndctl.events("TrainingResumed")[-1]["attempt"]
        for victim in victims:
            kill(victim.pid)
        _wait_until_it_trains_again(ndctl, attempt, f"{victims} were killed")
        ranks = {process.pid for process in before if process.kind == "rank"}
        assert not ranks & set(processes_of(ndctl.run_dir)), f"a rank outlived {victims}"
    losses = merge_losses(losses, ndctl.losses())
    assert sorted(losses) == list(range(1, max(losses) + 1))

    for process in processes(ndctl.run_dir):
        if process.kind == "agent":
            kill(process.pid)
    assert_nothing_left(ndctl.run_dir)
    assert ndctl("submit", "--resume", str(ndctl.run_dir / "spec.yaml")).code == 0
    wait_for(
        lambda: all_processes_run(processes(ndctl.run_dir)),
        "all processes after --resume",
    )
    assert ndctl("cancel", "e2e").code == 0
    assert_nothing_left(ndctl.run_dir)
    merge_losses(losses, ndctl.losses())
    assert not list(ndctl.run_dir.rglob("*.part"))
    assert not list((ndctl.run_dir / "checkpoints").glob("*partial*"))


def _wait_for_a_step(ndctl: Ndctl, when: str) -> None:
    steps = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > steps, f"a step {when}")


def _wait_until_it_trains_again(ndctl: Ndctl, attempt: int, why: str) -> None:
    def trains() -> bool:
        assert not ndctl.has_ended(), f"the job ended after {why}: {ndctl.actions()[-1]}"
        return any(event["attempt"] > attempt for event in ndctl.events("TrainingResumed"))

    wait_for(trains, f"the next attempt after {why}")
