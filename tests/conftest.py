"""Shared by all tests: their order and workers, and the settings of hypothesis."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.slurm.testbed",
    "tests.kubernetes.provision",
    "tests.kubernetes.testbed",
]

# Times on a loaded machine say nothing about the code.
EVER = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time, so that a change does not fail by chance.
settings.register_profile("ndctl", EVER, derandomize=True)
# Others each time, and they are kept: `make test-all` looks for what nobody has thought of.
settings.register_profile("explore", EVER)
settings.load_profile("ndctl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and every process of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FIRST = (
    "slurm",
    "e2e",
    "kubernetes",
    "trainer/parallel",
    "agent/test_injections.py",
    "trainer",
    "simulation",
    "agent",
)
"""Below tests/: what takes minutes comes first, or one worker would end up alone with it. The
control plane of Kubernetes is built while the first ones run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever order the tests were shuffled into."""
    for item in items:
        if _shares_a_fixture(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_turn)


def _shares_a_fixture(item: pytest.Item) -> bool:
    """With others of its module: it is made once where they run in one worker."""
    if not isinstance(item, pytest.Function):
        return False
    found = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope == "module" for several in found for fixture in several)


def _turn(item: pytest.Item) -> int:
    where = item.path.relative_to(Path(__file__).parent).as_posix()
    for mark in ("slurm", "kubernetes"):
        if item.get_closest_marker(mark) is not None:
            return LONGEST_FIRST.index(mark)
    turns = (n for n, begins in enumerate(LONGEST_FIRST) if where.startswith(begins))
    return next(turns, len(LONGEST_FIRST))
