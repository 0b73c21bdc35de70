"""A running job: `ndctl snapshot` and `ndctl profile`, and the ports in the table of
docs/reference.md."""

import gzip
import ipaddress
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, TP, Ndctl, assert_nothing_left, processes_of, wait_for
from tests.open_sockets import Listener, listeners

pytestmark = pytest.mark.process

KINDS = {
    "agent with `--lead`": r"run_module\.py orchestrator\.backends\.entry\.agent .*--lead",
    "agent": r"run_module\.py orchestrator\.backends\.entry\.agent ",
    "launcher": r"run_module\.py orchestrator\.agent\.processes\.fork_server",
    "torchrun": r"^torchrun of attempt",
    "keeper": r"orchestrator\.agent\.processes\.rank_watcher of",
    "rank": r"\(rank \d+\)",
}
"""Name of a process in the documented table to a pattern of its command line."""


COPIES = "each agent of a job that keeps copies of checkpoints in the memory of other hosts"
"""The row for a port that this job does not open."""


def kind_of(command: str) -> str:
    found = [kind for kind, pattern in KINDS.items() if re.search(pattern, command)]
    assert found, f"the table has no row for this process: {command}"
    return found[0]


def documented() -> dict[str, int]:
    """Kind of process to the number of ports that one such process opens, from the table."""
    text = (ROOT / "docs" / "reference.md").read_text()
    table = text.split("### Ports\n")[1].split("\n\n")
    rows = next(part for part in table if part.startswith("|")).splitlines()[2:]
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        process, count = (cell.strip() for cell in row.split("|")[1:3])
        counts[process] += int(count)
    del counts[COPIES]
    return counts


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ndctl]:
    """A job whose rank 1 sleeps in each step, so that the ranks leave the processors to others."""
    ndctl = Ndctl(tmp_path_factory.mktemp("running"))
    assert ndctl.submit("--drill", "slow:rank=1@step=2", train__steps="100000", **TP).code == 0
    try:
        wait_for(lambda: ndctl.num_steps() > 3 or ndctl.has_ended(), "steps")
        yield ndctl
    finally:
        cancelled = ndctl("cancel", "e2e")
    assert cancelled.code == 0, cancelled.err
    for verb in ("snapshot", "profile"):
        done = ndctl(verb, "e2e")
        assert done.code == 5
        assert "is not running: CANCELLED" in done.err
    assert_nothing_left(ndctl.run_dir)


def test_a_local_job_opens_only_the_ports_of_the_table_on_loopback(running: Ndctl) -> None:
    commands = processes_of(running.run_dir)
    opened: dict[int, list[Listener]] = defaultdict(list)
    for one in listeners(commands):
        opened[one.pid].append(one)
    commands = {pid: command for pid, command in commands.items() if command.strip()}
    kinds = {pid: kind_of(command) for pid, command in commands.items()}
    assert set(kinds.values()) == set(KINDS)
    for found in opened.values():
        for one in found:
            assert ipaddress.ip_address(one.address).is_loopback, (one, commands[one.pid])
    most: dict[str, int] = defaultdict(int)
    for pid, found in opened.items():
        most[kinds[pid]] = max(most[kinds[pid]], len(found))
    assert most == documented(), {commands[pid]: found for pid, found in opened.items()}


def test_the_stacks_of_all_ranks_are_shown_and_the_job_goes_on(running: Ndctl) -> None:
    ndctl = running
    done = ndctl("snapshot", "e2e", "--json")
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert next(iter(body.items())) == ("schema_version", 1)
    assert sorted(body["ranks"], key=int) == ["0", "1", "2", "3"]
    assert body["missing"] == {}
    assert all(one["step"] > 0 for one in body["ranks"].values())
    for rank in body["ranks"]:
        text = (Path(body["traces"]) / f"rank-{rank}.stacks").read_text()
        assert "trainer/loop.py" in text
    done = ndctl("snapshot", "e2e")
    assert done.out.startswith("attempt 1: 4 ranks, step")
    assert "stack of rank 0:" in done.out
    assert done.out.rstrip().endswith(f"{body['traces']}/rank-<r>.stacks")
    before = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > before, "the job to go on")
    assert not ndctl.events("EvidenceGathered")


def test_two_ranks_are_profiled_and_the_job_goes_on(running: Ndctl) -> None:
    """Ranks of both hosts record two steps each, and the job goes on."""
    ndctl = running
    done = ndctl("profile", "e2e", "--ranks", "1,2", "--steps", "2", "--json")
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert body["missing"] == {}
    assert sorted(body["ranks"]) == ["1", "2"]
    for rank, one in body["ranks"].items():
        [trace] = one["files"]
        assert trace.endswith(
            f"profiles/attempt-1/rank-{rank}.step-{one['first_step']}.trace.json.gz"
        )
        events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
        assert sum(event.get("name", "").startswith("Optimizer.step#") for event in events) == 2
    before = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > before, "the job to go on")
    done = ndctl("profile", "e2e", "--steps", "1")
    assert "rank 0, attempt 1, from step" in done.out
    assert "https://ui.perfetto.dev" in done.out
    done = ndctl("profile", "e2e", "--ranks", "4")
    assert done.code == 5
    assert "it has no rank 4: its ranks are 0 to 3" in done.err
    assert ndctl("profile", "e2e", "--ranks", "first").code == 2
