"""A real Slurm cluster for tests: a class around `slurm/testbed/slurm_testbed.sh`.

The fixture `slurm` is a cluster of 4 nodes x 2 fake GPUs below 2 leaf switches. Tests share it one
after the other; it is restored before each test. A test that needs another shape uses
`with running_testbed(nodes=16, gpus=1) as testbed:`. Both clean up after themselves. Mark such
tests with `pytestmark = pytest.mark.slurm`. Without Slurm they are skipped, and the end of the run
lists them.
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
"""A file in the testbed's folder, which is locked while the testbed runs."""
NOT_RUN = "NOT TESTED ON SLURM: "
FIRST_WITH_BLOCKS = (23, 11)
"""The first version of Slurm with topology/block."""
FIRST_WITH_TOPOLOGY_YAML = (25, 5)
"""The first version of Slurm with several topologies, in topology.yaml."""
FAST: Mapping[str, str] = {"TB_LEAF": "2"}
"""Knobs of the script for every testbed; its defaults already have short timeouts."""
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
        """Environment of a process that uses this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    @property
    def has_network(self) -> bool:
        """Whether nodes have their own network, so that a node can be disconnected."""
        return bool(self.knobs.get("TB_NET"))

    @property
    def address(self) -> str:
        """Address of this machine for processes on the nodes."""
        if not self.has_network:
            return "127.0.0.1"
        _, subnet = (self.folder / "etc" / "net").read_text().split()
        return f"{subnet}.254"

    def start(self) -> None:
        self._script("start", str(self.folder), str(self.nodes), str(self.gpus), timeout=300)

    def stop(self) -> None:
        """Ends every process, removes the network, and checks that nothing is left."""
        self._script("stop", str(self.folder), timeout=240)
        if left := self.leftovers():
            raise TestbedError(f"left behind by {self.folder}: {', '.join(left)}")

    def leftovers(self) -> list[str]:
        return self._script("left", str(self.folder)).splitlines()

    def kill_node(self, node: str, signal: str = "KILL") -> None:
        """Kills slurmd and every step of the node."""
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
        """Runs a command on this cluster; implements the `Shell` of our own code."""
        return run_within(argv, self.environ, timeout)

    def output_of(self, *argv: str, timeout: float = COMMAND_S) -> str:
        """The output of a command. Raises TestbedError if it fails."""
        done = self(argv, timeout=timeout)
        if done.code != 0:
            raise TestbedError(f"{' '.join(argv)}: {done.code} {done.err or done.out}")
        return done.out.strip()

    def node_state(self, node: str) -> str:
        """State of a node as sinfo prints it: `idle`, `mixed`, `down*`, …"""
        return self.output_of("sinfo", "-h", "-n", node, "-o", "%T").splitlines()[0]

    def wait_for(self, what: str, holds: Callable[[], object], timeout: float = 240) -> None:
        wait_until(what, holds, timeout)

    def restore(self) -> None:
        """Returns the cluster to its first state: no job, all nodes reachable and idle."""
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
    """None if Slurm's commands and daemons are installed; installs them if needed. `TB_DBD="1"`
    includes those of accounting."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}install.{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Other workers of this run wait for the packages.
        try:
            done = run_within([str(SCRIPT), "install"], {**os.environ, **knobs}, 250)
        except TimeoutError as exc:
            return f"installing Slurm's packages: {exc}"
    return None if done.code == 0 else " ".join(done.err.split()) or f"exit code {done.code}"


def slurm_version() -> tuple[int, int]:
    """Version of the installed Slurm, for example (24, 11)."""
    found = parse_version(run_within([str(SCRIPT), "version"], os.environ, COMMAND_S).out)
    assert found is not None
    return found


def network_knob() -> dict[str, str]:
    """As root each node gets its own network, or at least its own host name."""
    if run_within([str(SCRIPT), "can-net"], os.environ, 30).code == 0:
        return {"TB_NET": "1"}
    return {"TB_NS": "1"} if os.getuid() == 0 else {}


@contextlib.contextmanager
def running_testbed(
    nodes: int, gpus: int, knobs: Mapping[str, str] | None = None
) -> Iterator[SlurmTestbed]:
    """A cluster in its own folder. The path is short, because a socket's path is limited to 108
    characters."""
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
    """Stops the testbeds of test runs that were killed.

    The lock says whether a run is alive. Its process id does not: /tmp may be shared with another
    process namespace, as in `in_debian.sh`, where the id is unknown or that of another process.
    """
    for folder in Path("/tmp").glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError), (folder / IN_USE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.owner() == Path("~").expanduser().owner():
                SlurmTestbed(folder, 0, 0).stop()
                shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skips tests that start their own testbed if there is no Slurm."""
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
    """The shared cluster, restored to its initial state."""
    _shared.restore()
    return _shared


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts all tests on Slurm into one worker, because they share a cluster."""
    for item in items:
        if item.get_closest_marker("slurm") is not None:
            item.add_marker(pytest.mark.xdist_group("slurm"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    remedy = (
        "be root on Debian or Ubuntu with access to its package archive, or put the commands of"
        " Slurm and munge on PATH (any user)."
    )
    say_what_was_not_run(terminalreporter, NOT_RUN, "Slurm", remedy)
