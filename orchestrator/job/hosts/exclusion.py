"""Excludes hosts from the rest of the job."""

from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.job.host_state import Replaced
from orchestrator.job.state import Run


def replaced(run: Run, host: str, why: str, at: float) -> Run:
    """This job uses the host no more, and neither does a later leader of it."""
    run = excluded(run, {host: why})
    all_replaced = {**run.hosts.replaced, host: Replaced(at=at, why=why)}
    return replace(run, hosts=replace(run.hosts, replaced=all_replaced))


def excluded(run: Run, bad: Mapping[str, str]) -> Run:
    """Excludes hosts -> why. They stay excluded if the scheduler says that it opened them again."""
    why = {
        host: words
        for host, words in bad.items()
        if host not in {*run.hosts.exclude} - {*run.hosts.shut}
    }
    shut = tuple(host for host in run.hosts.shut if host not in bad)
    return replace(run, hosts=replace(run.hosts, exclude={**run.hosts.exclude, **why}, shut=shut))
