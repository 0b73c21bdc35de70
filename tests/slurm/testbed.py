"""A real Slurm cluster for tests: `slurm/testbed/slurm_testbed.sh` with time limits, as a class.

`slurm` is the cluster that tests share, one after the other, put in order before each:
4 nodes x 2 fake GPUs below 2 leaf switches. A test that needs another shape says
`with running_testbed(nodes=16, gpus=1) as testbed:`. Both leave nothing behind. Tests with either
carry `pytestmark = pytest.mark.slurm`, and are skipped, loudly, where there is no Slurm.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.doctor.slurm import parse_version
from orchestrator.seams import Completed
from tests.testbeds import TestbedError, run_within, say_what_was_not_run, wait_until

SCRIPT = Path(__file__).parents[2] / "slurm" / "testbed" / "slurm_testbed.sh"
PREFIX = "ndctl-slurm-"
IN_USE = "in-use"
"""Locked as long as the testbed in that folder is."""
NOT_RUN = "NOT TESTED ON SLURM: "
BLOCKS = (23, 11)
"""The first version that has topology/block."""
SEVERAL = (25, 5)
"""The first version that has several topologies, in topology.yaml."""
FAST: Mapping[str, str] = {"TB_LEAF": "2"}
"""Knobs of the script for every testbed; failures are quick by its own defaults."""
COMMAND_S = 120.0


@dataclass
class SlurmTestbed:
    folder: Path
    nodes: int
    gpus: int
    knobs: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    @property
    def environ(self) -> dict[str, str]:
        """For every process that is to use this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    @property
    def has_network(self) -> bool:
        """Whether nodes can be cut off."""
        return bool(self.knobs.get("TB_NET"))

    def start(self) -> None:
        self._script("start", str(self.folder), str(self.nodes), str(self.gpus), timeout=300)

    def stop(self) -> None:
        """End every process of it, take its network away, and see that nothing is left."""
        self._script("stop", str(self.folder), timeout=240)
        if left := self.leftovers():
            raise TestbedError(f"left behind by {self.folder}: {', '.join(left)}")

    def leftovers(self) -> list[str]:
        return self._script("left", str(self.folder)).splitlines()

    def kill_node(self, node: str, signal: str = "KILL") -> None:
        """slurmd and every step of the node."""
        self._script("kill-node", str(self.folder), node, signal)

    def start_node(self, node: str) -> None:
        self._script("start-node", str(self.folder), node)

    def stop_ctld(self, signal: str = "TERM") -> None:
        self._script("stop-ctld", str(self.folder), signal)

    def start_ctld(self) -> None:
        self._script("start-ctld", str(self.folder))

    def stop_dbd(self, signal: str = "TERM") -> None:
        self._script("stop-dbd", str(self.folder), signal)

    def start_dbd(self) -> None:
        self._script("start-dbd", str(self.folder))

    def net_down(self, node: str) -> None:
        self._script("net-down", str(self.folder), node)

    def net_up(self, node: str) -> None:
        self._script("net-up", str(self.folder), node)

    def _script(self, verb: str, *args: str, timeout: float = 120) -> str:
        environ = {**self.environ, **self.knobs}
        done = run_within([str(SCRIPT), verb, *args], environ, timeout)
        if done.code != 0:
            raise TestbedError(f"{SCRIPT.name} {verb} {' '.join(args)}: {done.err or done.out}")
        return done.out

    def __call__(self, argv: Sequence[str], /, *, timeout: float = COMMAND_S) -> Completed:
        """This cluster's commands, as the `Shell` of our own code."""
        return run_within(argv, self.environ, timeout)

    def output_of(self, *argv: str, timeout: float = COMMAND_S) -> str:
        """What a command printed. Raises TestbedError when it fails."""
        done = self(argv, timeout=timeout)
        if done.code != 0:
            raise TestbedError(f"{' '.join(argv)}: {done.code} {done.err or done.out}")
        return done.out.strip()

    def node_state(self, node: str) -> str:
        """In sinfo's words: `idle`, `mixed`, `down*`, …"""
        return self.output_of("sinfo", "-h", "-n", node, "-o", "%T").splitlines()[0]

    def wait_for(self, what: str, holds: Callable[[], object], timeout: float = 240) -> None:
        wait_until(what, holds, timeout)

    def restore(self) -> None:
        """As after the start: no job, all nodes up, reachable and idle."""
        self.start_ctld()
        for node in self.names:
            if self.has_network:
                self.net_up(node)
            self.start_node(node)
        self.wait_for("slurmctld", lambda: self.output_of("sinfo", "-h", timeout=5))
        if jobs := self.output_of("squeue", "-h", "-t", "all", "-o", "%A %T"):
            alive = [line.split()[0] for line in jobs.splitlines() if line.split()[1] not in ENDED]
            if alive:
                self(["scancel", *alive])
        self.wait_for("an empty queue", lambda: not self.output_of("squeue", "-h"))
        for reservation in _reservations(self.output_of("scontrol", "-o", "show", "reservations")):
            self.output_of("scontrol", "delete", f"ReservationName={reservation}")
        self.wait_for("all nodes idle", self._resumed)

    def _resumed(self) -> bool:
        states = self.output_of("sinfo", "-h", "-N", "-o", "%N %T")
        odd = {line.split()[0] for line in states.splitlines() if line.split()[1] != "idle"}
        for node in sorted(odd):
            self(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        return not odd


ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT")


def _reservations(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("ReservationName=")]
    return [line.split()[0].partition("=")[2] for line in lines]


def why_no_slurm(**knobs: str) -> str | None:
    """None where Slurm's commands and daemons are there, if need be after installing them; with
    `TB_DBD="1"` those of accounting as well."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}install.{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of this run wait for the packages
        try:
            done = run_within([str(SCRIPT), "install"], {**os.environ, **knobs}, 250)
        except TimeoutError as exc:
            return f"installing Slurm's packages: {exc}"
    return None if done.code == 0 else " ".join(done.err.split()) or f"exit code {done.code}"


def slurm_version() -> tuple[int, int]:
    """Of what is installed, as (24, 11); it decides what a testbed can have."""
    found = parse_version(run_within([str(SCRIPT), "version"], os.environ, COMMAND_S).out)
    assert found is not None
    return found


def network_knob() -> dict[str, str]:
    """As root each node has a network of its own, or at least a host name."""
    if run_within([str(SCRIPT), "can-net"], os.environ, 30).code == 0:
        return {"TB_NET": "1"}
    return {"TB_NS": "1"} if os.getuid() == 0 else {}


@contextlib.contextmanager
def running_testbed(
    nodes: int, gpus: int, knobs: Mapping[str, str] | None = None
) -> Iterator[SlurmTestbed]:
    """A cluster in a folder of its own, with a short path: a socket's may have 108 characters."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
    testbed = SlurmTestbed(folder, nodes, gpus, {**FAST, **network_knob(), **(knobs or {})})
    with (folder / IN_USE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            testbed.start()
            yield testbed
        finally:
            testbed.stop()
            shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Stop the testbeds of runs that were killed themselves.

    Whether a run lives its lock tells, not its process id: /tmp may be shared with processes of
    another namespace, as in `in_debian.sh`, where the id is nobody's or another's.
    """
    for folder in Path("/tmp").glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError), (folder / IN_USE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.owner() == Path("~").expanduser().owner():
                SlurmTestbed(folder, 0, 0).stop()
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skips, loudly, without Slurm; for tests that start a testbed of their own."""
    why = why_no_slurm()
    if why is not None:
        pytest.skip(f"{NOT_RUN}{why}")
    sweep()


@pytest.fixture(scope="session")
def _shared(slurm_available: None) -> Iterator[SlurmTestbed]:
    with running_testbed(nodes=4, gpus=2) as testbed:
        yield testbed


@pytest.fixture
def slurm(_shared: SlurmTestbed) -> SlurmTestbed:
    """The cluster that tests share, in order; what a test leaves, the next one puts right."""
    _shared.restore()
    return _shared


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Slurm run one after the other in one worker: they share a cluster."""
    for item in items:
        if item.get_closest_marker("slurm") is not None:
            item.add_marker(pytest.mark.xdist_group("slurm"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    remedy = (
        "be root on Debian or Ubuntu with its package archive in reach, or put the commands of"
        " Slurm and munge on PATH (any user)."
    )
    say_what_was_not_run(terminalreporter, NOT_RUN, "Slurm", remedy)
