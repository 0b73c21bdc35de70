"""Parsers on captured answers of three versions of Slurm on one cluster."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.slurm import observe
from orchestrator.backends.slurm.commands import UNKNOWN_JOB, Slurm
from orchestrator.backends.slurm.pending_hints import standing_words
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.doctor.slurm import judge_config
from orchestrator.errors import Unanswered
from orchestrator.inventory.slurm.config import parse_config
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.inventory.slurm.captured import captured

VERSIONS = ("22.05.8", "24.11.5", "26.05.5")
NOW = datetime(2026, 11, 22, 20, tzinfo=UTC).timestamp()

every_version = pytest.mark.parametrize("version", VERSIONS)


def captured_answers(version: str, file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(captured(f"{version}/{file}.json"))
    return found


@dataclass(frozen=True)
class FixedAnswer:
    """A shell that always gives the same answer."""

    code: int
    out: str
    err: str

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        return Completed(self.code, self.out, self.err)


def ask(one: dict[str, Any]) -> Completed:
    shell = FixedAnswer(one["code"], one["out"], one["err"])
    return Slurm(shell, TurnedClock()).ask(one["argv"])


@every_version
def test_every_command_fails_while_slurmctld_is_down(version: str) -> None:
    asked = [
        one for one in captured_answers(version, "down") if one["argv"] != ["scontrol", "ping"]
    ]
    assert len(asked) == 12
    for one in asked:
        with pytest.raises(Unanswered):
            ask(one)


@every_version
def test_a_refused_command_is_not_retried(version: str) -> None:
    for one in captured_answers(version, "refusals"):
        assert ask(one) == Completed(one["code"], one["out"], one["err"])


@every_version
def test_a_job_unknown_to_slurm_is_recognised(version: str) -> None:
    asked = ["scontrol", "show", "job", "-a", "-o", "999999"]
    (shown,) = [one for one in captured_answers(version, "refusals") if one["argv"] == asked]
    assert shown["code"] == 1
    assert UNKNOWN_JOB.search(shown["err"])


HELD_AGAIN = "Slurm job 12 is PENDING (job requeued in held state): the job was requeued by hand"


@every_version
def test_jobs_in_every_state_are_parsed(version: str) -> None:
    jobs = {int(job.id): job for job in observe.parse_jobs(captured(f"{version}/jobs.txt"), UTC)}
    assert {number: (job.state, job.meaning) for number, job in jobs.items()} == {
        1: ("RUNNING", "running"),
        2: ("RUNNING", "running"),
        3: ("TIMEOUT", "ended"),
        4: ("COMPLETED", "ended"),
        5: ("FAILED", "ended"),
        6: ("NODE_FAIL", "ended"),
        7: ("PENDING", "queued"),
        8: ("PENDING", "queued"),
        9: ("PENDING", "held"),
        10: ("PENDING", "held"),
        11: ("CANCELLED", "ended"),
        12: ("PENDING", "held"),
        13: ("PENDING", "queued"),
        14: ("PENDING", "queued"),
        15: ("COMPLETING", "leaving"),
    }
    first, again = jobs[1], jobs[13]
    assert (
        first.comment == "ndctl launch 1 of /shared/runs/a b;"
    )  # ends before the text that looks like a key
    assert (first.command, first.nodes) == ("/tmp/tb/job.sh", ("node1",))
    assert first.excluded == ("node5", "node6")
    assert first.ends_at == first.limit_at
    assert (again.restarts, again.excluded, again.nodes) == (1, ("node4", "node5"), ())
    assert standing_words(jobs[12]).startswith(HELD_AGAIN)
    assert "`scontrol release 12`" in standing_words(jobs[12])
    assert {n: observe.cause(jobs[n], 0, NOW, 90) for n in (3, 11, 13, 15)} == {
        3: "time-limit",
        11: "cancelled",
        13: "requeued",
        15: "cancelled",
    }


@every_version
def test_squeue_and_scontrol_agree_on_jobs(version: str) -> None:
    shown = observe.parse_jobs(captured(f"{version}/jobs.txt"), UTC)
    # The capture is older than the fields %x (the exclude list), %S (the start), %V (submission).
    lines = captured(f"{version}/queue.txt").splitlines()
    text = "\n".join(
        "|".join([*row[:3], "(null)", "N/A", "N/A", row[3]])
        for row in (x.split("|", 3) for x in lines)
    )
    queue = {job.id: job for job in observe.parse_queue(text)}
    assert set(queue) == {job.id for job in shown}
    for job in shown:
        listed = replace(queue[job.id], starts_at=job.starts_at)
        assert listed.state == job.state
        assert listed.comment.startswith(job.comment)
        assert (listed.meaning, standing_words(listed)) == (job.meaning, standing_words(job))
        assert listed.command.split()[0] == job.command.split()[0]


@every_version
def test_the_settings_of_a_site_are_parsed(version: str) -> None:
    config = parse_config(captured(f"{version}/config.txt"))
    assert config["SLURM_VERSION"] == version
    found = {one.what: one for one in judge_config(config, SlurmSpec())}
    assert found["prolog"].found.startswith("/bin/true checks nodes before a job")
    assert found["preemption"].found == "PreemptMode=REQUEUE, preempt/partition_prio"
    assert found["kill wait"].found.startswith("6 s")
    assert found["dead nodes"].found.startswith("Slurm detects one after 5 sec")
    assert "wait time" not in found
