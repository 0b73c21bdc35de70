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
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.seams import Completed

SCRIPT = Path(__file__).parents[2] / "slurm" / "testbed" / "slurm_testbed.sh"
PREFIX = "ndctl-slurm-"
NOT_RUN = "NOT TESTED ON SLURM: "
FAST: Mapping[str, str] = {"TB_LEAF": "2"}
"""Knobs of the script for every testbed; failures are quick by its own defaults."""
COMMAND_S = 30.0


class TestbedError(AssertionError):
    """The cluster did not do what a test told it to."""

    __test__ = False


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
        self._script("start", str(self.folder), str(self.nodes), str(self.gpus), timeout=150)

    def stop(self) -> None:
        """End every process of it, take its network away, and see that nothing is left."""
        self._script("stop", str(self.folder), timeout=90)
        if left := self.left():
            raise TestbedError(f"left behind by {self.folder}: {', '.join(left)}")

    def left(self) -> list[str]:
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

    def net_down(self, node: str) -> None:
        self._script("net-down", str(self.folder), node)

    def net_up(self, node: str) -> None:
        self._script("net-up", str(self.folder), node)

    def _script(self, verb: str, *args: str, timeout: float = 60) -> str:
        environ = {**self.environ, **self.knobs}
        done = run_within([str(SCRIPT), verb, *args], environ, timeout)
        if done.code != 0:
            raise TestbedError(f"{SCRIPT.name} {verb} {' '.join(args)}: {done.err or done.out}")
        return done.out

    def __call__(self, argv: Sequence[str], /, *, timeout: float = COMMAND_S) -> Completed:
        """This cluster's commands, as the `Shell` of our own code."""
        return run_within(argv, self.environ, timeout)

    def told(self, *argv: str, timeout: float = COMMAND_S) -> str:
        """What a command printed. Raises TestbedError when it fails."""
        done = self(argv, timeout=timeout)
        if done.code != 0:
            raise TestbedError(f"{' '.join(argv)}: {done.code} {done.err or done.out}")
        return done.out.strip()

    def node_state(self, node: str) -> str:
        """In sinfo's words: `idle`, `mixed`, `down*`, …"""
        return self.told("sinfo", "-h", "-n", node, "-o", "%T").splitlines()[0]

    def wait_for(self, what: str, holds: Callable[[], object], timeout: float = 60) -> None:
        """Poll; an error of a command counts as `not yet`."""
        end, last = time.monotonic() + timeout, "it does not hold"
        while time.monotonic() < end:
            try:
                if holds():
                    return
            except (TestbedError, TimeoutError) as exc:
                last = str(exc)
            time.sleep(0.1)
        raise TestbedError(f"waited {timeout:.0f} s for {what}: {last}")

    def restore(self) -> None:
        """As after the start: no job, all nodes up, reachable and idle."""
        self.start_ctld()
        for node in self.names:
            if self.has_network:
                self.net_up(node)
            self.start_node(node)
        self.wait_for("slurmctld", lambda: self.told("sinfo", "-h", timeout=5))
        if jobs := self.told("squeue", "-h", "-t", "all", "-o", "%A %T"):
            alive = [line.split()[0] for line in jobs.splitlines() if line.split()[1] not in ENDED]
            if alive:
                self(["scancel", *alive])
        self.wait_for("an empty queue", lambda: not self.told("squeue", "-h"))
        for reservation in _reservations(self.told("scontrol", "-o", "show", "reservations")):
            self.told("scontrol", "delete", f"ReservationName={reservation}")
        self.wait_for("all nodes idle", self._resumed)

    def _resumed(self) -> bool:
        states = self.told("sinfo", "-h", "-N", "-o", "%N %T")
        odd = {line.split()[0] for line in states.splitlines() if line.split()[1] != "idle"}
        for node in sorted(odd):
            self(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
        return not odd


ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT")


def _reservations(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("ReservationName=")]
    return [line.split()[0].partition("=")[2] for line in lines]


def run_within(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> Completed:
    """Run a command to its end or kill it; its output goes to files, which daemons that it leaves
    running may keep open without our waiting for them."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(
                list(argv),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout,
                check=False,
            ).returncode
        except FileNotFoundError as exc:
            return Completed(127, "", str(exc))
        except subprocess.TimeoutExpired as exc:
            raise TimeoutError(f"{argv[0]} did not end within {timeout:.0f} s") from exc
        out.seek(0)
        err.seek(0)
        return Completed(code, out.read(), err.read())


def why_no_slurm() -> str | None:
    """None where Slurm's commands and daemons are there, if need be after installing them."""
    with (Path(tempfile.gettempdir()) / f"{PREFIX}install.{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of this run wait for the packages
        try:
            done = run_within([str(SCRIPT), "install"], os.environ, 250)
        except TimeoutError as exc:
            return f"installing Slurm's packages: {exc}"
    return None if done.code == 0 else " ".join(done.err.split()) or f"exit code {done.code}"


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
    try:
        testbed.start()
        yield testbed
    finally:
        testbed.stop()
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Stop the testbeds of runs that were killed themselves."""
    for folder in Path("/tmp").glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if folder.is_dir() and folder.owner() == Path("~").expanduser().owner() and _gone(pid):
            SlurmTestbed(folder, 0, 0).stop()
            shutil.rmtree(folder, ignore_errors=True)


def _gone(pid: str) -> bool:
    return pid.isdigit() and not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="session")
def slurm_there() -> None:
    """Skips, loudly, without Slurm; for tests that start a testbed of their own."""
    why = why_no_slurm()
    if why is not None:
        pytest.skip(f"{NOT_RUN}{why}")
    sweep()


@pytest.fixture(scope="session")
def _shared(slurm_there: None) -> Iterator[SlurmTestbed]:
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
    """Say which tests were not run for want of Slurm, and why, after everything else."""
    skipped = [
        (report.nodeid.partition("@")[0], str(report.longrepr[2]))
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and NOT_RUN in str(report.longrepr[2])
    ]
    if not skipped:
        return
    why = skipped[0][1].partition(NOT_RUN)[2]
    terminalreporter.section("Slurm was NOT tested", red=True, bold=True)
    terminalreporter.line(f"{len(skipped)} tests on a real Slurm were NOT run: {why}")
    for nodeid, _ in skipped:
        terminalreporter.line(f"  not run: {nodeid}")
    terminalreporter.line(
        "To run them: be root on Debian or Ubuntu with its package archive in reach, or put the"
        " commands of Slurm and munge on PATH (any user)."
    )
