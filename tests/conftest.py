"""Settings of all tests: their order, their grouping into workers, and hypothesis."""

import atexit
import gc
import itertools
import os
import re
import shutil
import signal
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.slurm.testbed",
    "tests.kubernetes.provision",
    "tests.kubernetes.testbed",
]

# Without a deadline, because a loaded machine may be slow.
COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run, so that a test does not fail by chance.
settings.register_profile("ndctl", COMMON, derandomize=True)
# New examples in each run of `make test-all`, and failing ones are stored.
settings.register_profile("explore", COMMON)
settings.load_profile("ndctl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and all processes of tests inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch reads it when it is imported. With more threads, tests that train in this process take ten
# times the processor time while other workers use the cores, because idle threads poll. Agents set
# it for their ranks too.
os.environ["OMP_NUM_THREADS"] = "1"

# Collecting imports thousands of modules and creates thousands of tests, which all stay until the
# end. Garbage collection would look at them again and again.
gc.disable()

# Jobs that tests submit must not appear in the list of the person who runs the tests.
STATE_HOME = Path(tempfile.mkdtemp(prefix="ndctl-tests-"))
atexit.register(shutil.rmtree, STATE_HOME, ignore_errors=True)
os.environ["XDG_STATE_HOME"] = str(STATE_HOME)
os.environ.pop("NDCTL_INDEX", None)
# Nor may that person's settings change a test.
os.environ["XDG_CONFIG_HOME"] = str(STATE_HOME / "config")

LONGEST_FIRST = (
    "repository/test_types.py",
    "slurm",
    "e2e",
    "kubernetes",
    "trainer/parallel",
    "agent/test_injections.py",
    "trainer",
    "simulation",
    "cli/test_hostile_text.py",
    "agent",
)
"""Paths below tests/ that take minutes. They run first, so that no worker runs one alone at the
end. Slurm comes before Kubernetes, because the control plane of Kubernetes is built meanwhile."""


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def state_home(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder for each test, so that none lists the jobs of another."""
    folder = STATE_HOME / str(next(_numbers))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def part_of(text: str) -> tuple[int, int]:
    """`3/20`: the third of twenty parts."""
    number, _, parts = text.partition("/")
    if re.fullmatch(r"\d{1,4}/\d{1,4}", text) and 1 <= int(number) <= int(parts):
        return int(number), int(parts)
    raise pytest.UsageError(f"--part must be K/N with K from 1 to N, got {text!r}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts, whole files each")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--part`, and sort them, also if another plugin has shuffled them."""
    if (part := config.getoption("--part")) is not None:
        number, parts = part_of(part)
        items[:] = [
            item
            for item in items
            if zlib.crc32(item.nodeid.partition("::")[0].encode()) % parts == number - 1
        ]
    for item in items:
        if _shares_a_fixture(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_position)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Whether a fixture of the module is used: tests that share it run in one worker."""
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope == "module" for fixtures in definitions for fixture in fixtures)


def _position(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    for mark in ("slurm", "kubernetes"):
        if item.get_closest_marker(mark) is not None:
            return LONGEST_FIRST.index(mark)
    positions = (n for n, prefix in enumerate(LONGEST_FIRST) if path.startswith(prefix))
    return next(positions, len(LONGEST_FIRST))
