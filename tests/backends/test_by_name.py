"""Which interfaces each backend implements."""

import pytest

from orchestrator.backends.by_name import HERE, backend_named, scheduler_named
from orchestrator.system import run_command
from tests.agent.world import TurnedClock


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("local", {"fixed_hosts"}),
        ("slurm", {"granted", "fixed_hosts", "unattended"}),
        (HERE, {"granted", "fixed_hosts"}),
        ("kubernetes", {"granted", "successors"}),
    ],
)
def test_each_backend_implements_only_its_interfaces(name: str, found: set[str]) -> None:
    backend = backend_named(name, {}, TurnedClock(), run_command)
    offered = {
        "granted": backend.granted,
        "fixed_hosts": backend.fixed_hosts,
        "successors": backend.successors,
        "unattended": backend.unattended,
    }
    assert {key for key, value in offered.items() if value is not None} == found
    scheduler: object = scheduler_named(name, {}, TurnedClock(), run_command)
    assert type(scheduler) is type(backend)
