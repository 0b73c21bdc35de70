"""Kills random processes of a job with checkpoints in memory on two partner hosts.

    python -m tests.e2e.kills.memory_kills [KILLS] [--seed N] [--mesh NAME] [--batch N] [--default]

Each kill ends a rank, one of the processes above it, a host, the leader, two hosts, or a host and
one that keeps its copies. Some come while slots are being sent, while a checkpoint is being written
to the disk, or again while the next attempt loads. Seeds are reproducible as far as the machine's
timing is. A larger batch makes steps longer; `MESHES` has the meshes, of 4 to 8 ranks.

Checked: all losses are those of the same job without a kill, bit by bit; no file of a checkpoint is
read where memory suffices; `lost_steps` of the incidents agree with what is seen from outside; an
agent has no more slots than planned; no process is left, and with it no memory. Prints for each
kind of kill how often the job resumed from memory, lost steps, and seconds to the next attempt.
"""

import argparse
import contextlib
import logging
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.e2e.job import Ndctl, assert_nothing_left, kill, wait_for
from tests.e2e.kills.targets import Process, is_sending, partners, processes, slots
from tests.e2e.kills.test_random_kills import merge_losses

LOG = logging.getLogger(__name__)

COPIES, OWN, HELD = 2, 4, 2
"""Most copies on partners, slots of a rank, and slots that a partner keeps of each."""
OFTEN = {"checkpoint__memory__every": "1", "checkpoint__memory__copies": str(COPIES)}
DEFAULT = {"checkpoint__memory__every": "auto"}
"""The other keys have their defaults anyway."""


@dataclass(frozen=True, kw_only=True)
class MeshOfJob:
    hosts: int
    ranks_per_host: int = 1
    degrees: Mapping[str, int]

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


MESHES: Mapping[str, MeshOfJob] = {
    "fsdp4": MeshOfJob(hosts=4, degrees={}),
    "pp2 x fsdp2": MeshOfJob(hosts=4, degrees={"pp": 2}),
    "hsdp 2x2": MeshOfJob(hosts=4, degrees={"dp_replicate": 2}),
    "fsdp6": MeshOfJob(hosts=6, degrees={}),
    "tp2 x fsdp4": MeshOfJob(hosts=4, ranks_per_host=2, degrees={"tp": 2}),
    "pp2 x fsdp4": MeshOfJob(hosts=4, ranks_per_host=2, degrees={"pp": 2}),
    "fsdp8": MeshOfJob(hosts=8, degrees={}),
}
SINGLE = ("rank", "keeper", "torchrun", "launcher", "agent", "host")
KINDS = (
    *SINGLE,
    "two hosts",
    "host and partner",
    "during copy",
    "during save",
    "during load",
    "leader",
)
WAIT_FOR_MOMENT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What followed a kill."""

    kind: str
    in_memory: bool
    lost_steps: int
    seconds: float
    """Until the next attempt resumed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    recoveries: Sequence[Recovery]
    losses: Mapping[int, float]
    step_s: float
    """Median of all steps."""


class Killer:
    def __init__(
        self,
        ndctl: Ndctl,
        mesh: MeshOfJob,
        seed: int,
        batch: int = 24,
        memory: Mapping[str, str] = OFTEN,
    ) -> None:
        self.ndctl, self.mesh, self.draw = ndctl, mesh, random.Random(seed)
        self.losses: dict[int, float] = {}
        self.step_times: list[float] = []
        self.options = {
            "cluster__hosts": str(mesh.hosts),
            "cluster__gpus_per_host": str(mesh.ranks_per_host),
            "train__steps": "100000",  # more than any machine trains meanwhile
            "train__global_batch_size": str(batch),
            "checkpoint__every_steps": "50",
            **memory,
            "resilience__max_restarts": "1000",
            **{f"parallel__{axis}": str(degree) for axis, degree in mesh.degrees.items()},
        }

    def run(self, kills: int) -> Report:
        """Kill as often as asked."""
        self._start(self.options)
        recoveries = []
        for turn in range(kills):
            wait_for(self._all_run, f"all processes before kill {turn}")
            # Copies on partners need a few steps.
            steps = self.ndctl.num_steps() + self.draw.randint(3, 12)
            wait_for(lambda: self.ndctl.num_steps() >= steps, f"steps before kill {turn}")  # noqa: B023
            self._look()
            kind = self.draw.choice(KINDS)
            recoveries.append(self._one(kind))
            LOG.info("%d/%d %s", turn + 1, kills, recoveries[-1])
        wait_for(self._all_run, "all processes at the end")
        self._check_incidents(recoveries)
        self._end()
        return Report(
            recoveries=recoveries, losses=self.losses, step_s=median(self.step_times or [0.0])
        )

    def undisturbed(self, last: int) -> Mapping[int, float]:
        """The losses of the same job without a kill, up to step `last`."""
        self._start({**self.options, "checkpoint__memory__every": "off"})
        wait_for(lambda: self.ndctl.num_steps() >= last, f"step {last}")
        self._end()
        return self.losses

    def _start(self, options: Mapping[str, str]) -> None:
        done = self.ndctl.submit(**options)
        assert done.code == 0, done.out + done.err

    def _end(self) -> None:
        assert self.ndctl("cancel", "e2e").code == 0
        self._look()
        assert_nothing_left(self.ndctl.run_dir)
        self._look()

    def _look(self) -> None:
        """Keep the losses before a resume truncates them, and how long steps took."""
        metrics = self.ndctl.metrics()
        new = [metric["step_s"] for metric in metrics if metric["step"] not in self.losses]
        self.step_times += new
        self.losses = merge_losses(self.losses, self.ndctl.losses())

    def _expected(self) -> Mapping[str, int]:
        hosts, ranks = self.mesh.hosts, self.mesh.ranks
        per_host = dict.fromkeys(("torchrun", "launcher", "agent"), hosts)
        return {**per_host, "rank": ranks, "keeper": ranks}

    def _all_run(self) -> bool:
        kinds = [process.kind for process in processes(self.ndctl.run_dir)]
        expected = self._expected()
        return {kind: kinds.count(kind) for kind in expected} == expected

    @property
    def _leader_pid(self) -> int:
        pid: int = self.ndctl.events("LeaderStarted")[-1]["pid"]
        return pid

    def _victims(self, kind: str) -> Sequence[Process]:
        found = processes(self.ndctl.run_dir)
        leads = next((one.host for one in found if one.pid == self._leader_pid), "")
        others = [one for one in found if one.pid != self._leader_pid]
        agents = [one for one in others if one.kind == "agent"]
        hosts = sorted(one.host for one in agents if one.host != leads)
        match kind:
            case "leader":
                return [one for one in found if one.pid == self._leader_pid]
            case "host":
                first = self.draw.choice(hosts)
                return [one for one in others if one.host == first]
            case "two hosts":
                pair = self.draw.sample(hosts, 2)
                return [one for one in others if one.host in pair]
            case "host and partner":
                first = self.draw.choice(hosts)
                keepers = [one for one in partners(self.ndctl)[first] if one != leads]
                pair = [first, *keepers[:1]]
                return [one for one in others if one.host in pair]
            case _:
                candidates = sorted(one.pid for one in others if one.kind == kind)
                if not candidates:  # an attempt that loads has no ranks yet
                    return []
                pid = self.draw.choice(candidates)
                return [one for one in others if one.pid == pid]

    def _kill(self, kind: str) -> None:
        victims = self._victims(kind)
        # Agents first, so that none of them reports what it loses.
        for victim in sorted(victims, key=lambda one: one.kind != "agent"):
            with contextlib.suppress(ProcessLookupError):  # it ended with what was killed before
                kill(victim.pid)

    def _one(self, kind: str) -> Recovery:
        before = self.ndctl.events("TrainingResumed")[-1]["attempt"]
        self._check_slots()
        self._wait_for_moment(kind)
        some = kind.startswith("during")
        self._kill(self.draw.choice(SINGLE) if some else kind)
        begun = time.monotonic()
        self._untouched()
        if kind == "during load":
            self._ordered_after(before)
            time.sleep(self.draw.uniform(0.0, 2.0))
            self._kill(self.draw.choice(("rank", "agent", "torchrun")))
        self._look()
        reached = self.ndctl.metrics()[-1]["step"]
        found = self._resumed_after(before, kind)
        if found["step"] and found.get("in_memory"):
            self._assert_unread()
        return Recovery(
            kind=kind,
            in_memory=bool(found.get("in_memory")),
            lost_steps=max(0, reached - found["step"]),
            seconds=time.monotonic() - begun,
        )

    def _ordered_after(self, attempt: int) -> None:
        def ordered() -> bool:
            actions = self.ndctl.actions()
            return any(a["kind"] == "StartAttempt" and a["attempt"] > attempt for a in actions)

        wait_for(ordered, "the order to start the next attempt")

    def _resumed_after(self, attempt: int, kind: str) -> Mapping[str, int]:
        def resumed() -> Mapping[str, int]:
            ended = self.ndctl.has_ended()
            assert not ended, f"the job ended after {kind}: {self.ndctl.actions()[-1]}"
            last: Mapping[str, int] = self.ndctl.events("TrainingResumed")[-1]
            # After a kill during the load the first resume may be cut off.
            return last if last["attempt"] > attempt and self._all_run() else {}

        found: Mapping[str, int] = wait_for(resumed, f"the next attempt after {kind}")
        return found

    def _wait_for_moment(self, kind: str) -> None:
        """Until slots are being sent, or a checkpoint is being written."""
        agents = [one for one in processes(self.ndctl.run_dir) if one.kind == "agent"]
        moments: Mapping[str, Callable[[], bool]] = {
            "during copy": lambda: any(is_sending(agent.pid) for agent in agents),
            "during save": lambda: any(self._checkpoints.glob("*partial*")),
        }
        if (moment := moments.get(kind)) is None:
            return
        until = time.monotonic() + WAIT_FOR_MOMENT_S
        while not moment() and time.monotonic() < until:
            time.sleep(0.002)

    @property
    def _checkpoints(self) -> Path:
        return self.ndctl.run_dir / "checkpoints"

    def _untouched(self) -> None:
        """Set the times of all shards so that any file system notes the next read of one."""
        for shard in self._checkpoints.glob("step-*/*.distcp"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(shard, (0, shard.stat().st_mtime))

    def _assert_unread(self) -> None:
        for shard in self._checkpoints.glob("step-*/*.distcp"):
            with contextlib.suppress(FileNotFoundError):
                # A checkpoint that was written since has a later time.
                times = shard.stat()
                assert times.st_atime == 0 or times.st_mtime > time.time() - 60, f"{shard} was read"

    def _check_slots(self) -> None:
        """Memory is bounded: an agent has no more slots than it plans."""
        most = (OWN + HELD * COPIES) * self.mesh.ranks_per_host
        for agent in processes(self.ndctl.run_dir):
            if agent.kind == "agent":
                count = len({inode for _, inode in slots(agent.pid)})
                assert count <= most, f"{agent.host} has {count} slots, more than {most}"

    def _check_incidents(self, recoveries: Sequence[Recovery]) -> None:
        """What the job says is lost is not less than what is seen from outside."""
        told = [incident["lost_steps"] or 0 for incident in self.ndctl.status()["incidents"]]
        seen = max((one.lost_steps for one in recoveries), default=0)
        assert max(told, default=0) >= seen - 1, f"{told} steps were lost, and {seen} seen"


def check(
    folder: Path,
    kills: int,
    seed: int,
    mesh: str = "fsdp4",
    batch: int = 24,
    memory: Mapping[str, str] = OFTEN,
) -> Report:
    """Kill, and compare all losses with those of an undisturbed job."""
    report = Killer(Ndctl(folder / "killed"), MESHES[mesh], seed, batch, memory).run(kills)
    losses = report.losses
    assert sorted(losses) == list(range(1, max(losses) + 1))
    undisturbed = Killer(Ndctl(folder / "undisturbed"), MESHES[mesh], seed, batch)
    reference = undisturbed.undisturbed(max(losses))
    different = {step: loss for step, loss in losses.items() if loss != reference[step]}
    assert not different, f"losses differ: {different}"
    return report


def table(recoveries: Sequence[Recovery]) -> str:
    by_kind: dict[str, list[Recovery]] = defaultdict(list)
    for one in recoveries:
        by_kind[one.kind].append(one)
    lines = ["kind              kills  from memory  lost steps: median  most  seconds: median"]
    for kind, found in sorted(by_kind.items()):
        lost = sorted(one.lost_steps for one in found)
        memory = sum(one.in_memory for one in found)
        seconds = median(one.seconds for one in found)
        lines.append(
            f"{kind:17} {len(found):5}  {memory:11}  {lost[len(lost) // 2]:18}  {lost[-1]:4}"
            f"  {seconds:15.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mesh", choices=MESHES, default="fsdp4")
    parser.add_argument("--batch", type=int, default=24, help="sequences, a multiple of 24")
    parser.add_argument(
        "--default",
        action="store_true",
        help="checkpoints in memory as the spec has them by default, in place of one of every step"
        " on two partners",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        memory = DEFAULT if args.default else OFTEN
        report = check(Path(folder), args.kills, args.seed, args.mesh, args.batch, memory)
    found = report.recoveries
    LOG.info("%s\n%s, steps of %.2f s", table(found), args.mesh, report.step_s)
    LOG.info("%d kills, all losses bitwise equal", len(found))


if __name__ == "__main__":
    main()
