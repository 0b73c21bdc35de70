"""A job opens exactly the ports in the table of docs/reference.md."""

import ipaddress
import re
from collections import defaultdict

import pytest

from tests.e2e.job import ROOT, TP, Ndctl, processes_of, wait_for
from tests.open_sockets import Listener, listeners

KINDS = {
    "agent with `--lead`": r"run_module\.py orchestrator\.backends\.entry\.agent .*--lead",
    "agent": r"run_module\.py orchestrator\.backends\.entry\.agent ",
    "launcher": r"run_module\.py orchestrator\.agent\.processes\.fork_server",
    "torchrun": r"^torchrun of attempt",
    "keeper": r"orchestrator\.agent\.processes\.rank_watcher of",
    "rank": r"\(rank \d+\)",
}
"""Name of a process in the documented table to a pattern of its command line."""


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
    return counts


@pytest.mark.process
def test_a_local_job_opens_only_the_ports_of_the_table_on_loopback(ndctl: Ndctl) -> None:
    assert ndctl.submit(train__steps="100000", **TP).code == 0
    wait_for(lambda: ndctl.num_steps() > 3 or ndctl.has_ended(), "steps")
    commands = processes_of(ndctl.run_dir)
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
    assert ndctl("cancel", "e2e").code == 0
