"""Kills random processes of a job with checkpoints in memory on partner hosts.

    python -m tests.e2e.kills.memory_kills [KILLS] [--seed N]

The job has four hosts, and each sends copies to two others, at a limited speed, so that most kills
come during a copy. Each kill ends a rank, one of the processes above it, a host, two hosts, or a
host and one that keeps its copies; some are followed by another kill while the next attempt loads.
Prints a table: for each kind of kill how often the job resumed from memory, and how many steps were
lost. All losses must be those of the same job without a kill, bit by bit.
"""

import argparse
import contextlib
import logging
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.job import Ndctl, assert_nothing_left, kill, wait_for
from tests.e2e.kills.test_random_kills import Process, merge_losses, processes

LOG = logging.getLogger(__name__)

HOSTS = 4
OPTIONS: Mapping[str, str] = {
    "cluster__hosts": str(HOSTS),
    "cluster__gpus_per_host": "1",
    "train__steps": "100000",
    "checkpoint__every_steps": "50",
    "checkpoint__memory__every": "1",
    "checkpoint__memory__copies": "2",
    "checkpoint__memory__copy_mib_per_s": "50",
    "resilience__max_restarts": "1000",
}
"""More steps than any machine trains meanwhile."""
SINGLE = ("rank", "keeper", "torchrun", "launcher", "agent")
KINDS = (*SINGLE, "two hosts", "during load")
EXPECTED: Mapping[str, int] = dict.fromkeys(SINGLE, HOSTS)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What followed a kill."""

    kind: str
    in_memory: bool
    lost_steps: int


def kill_randomly(ndctl: Ndctl, kills: int, seed: int) -> tuple[list[Recovery], dict[int, float]]:
    """Kill as often as asked; returns what followed each, and the losses of all steps."""
    draw = random.Random(seed)
    done = ndctl.submit(**OPTIONS)
    assert done.code == 0, done.out + done.err
    losses: dict[int, float] = {}
    recoveries = []
    for turn in range(kills):
        wait_for(lambda: _all_run(ndctl), f"all processes before kill {turn}")
        # Copies on partners need a few steps.
        steps = ndctl.num_steps() + draw.randint(2, 12)
        wait_for(lambda: ndctl.num_steps() >= steps, f"steps before kill {turn}")  # noqa: B023
        kind = draw.choice(KINDS)
        losses = merge_losses(losses, ndctl.losses())
        recovery = _kill_once(ndctl, draw, kind, losses)
        recoveries.append(recovery)
        LOG.info("%d/%d %s", turn + 1, kills, recovery)
    losses = merge_losses(losses, ndctl.losses())
    assert ndctl("cancel", "e2e").code == 0
    assert_nothing_left(ndctl.run_dir)
    return recoveries, merge_losses(losses, ndctl.losses())


def _all_run(ndctl: Ndctl) -> bool:
    kinds = [process.kind for process in processes(ndctl.run_dir)]
    return {kind: kinds.count(kind) for kind in EXPECTED} == EXPECTED


def _kill_once(ndctl: Ndctl, draw: random.Random, kind: str, losses: dict[int, float]) -> Recovery:
    before = ndctl.events("TrainingResumed")[-1]["attempt"]
    _kill(ndctl, draw, "two hosts" if kind == "two hosts" else draw.choice(SINGLE))
    if kind == "during load":
        time.sleep(draw.uniform(0.3, 3.0))
        _kill(ndctl, draw, draw.choice(("rank", "agent", "torchrun")))
    losses.update(merge_losses(losses, ndctl.losses()))
    reached = max(losses)

    def resumed() -> dict[str, int]:
        assert not ndctl.has_ended(), f"the job ended after {kind}: {ndctl.actions()[-1]}"
        last: dict[str, int] = ndctl.events("TrainingResumed")[-1]
        # After a kill during the load the first resume may be cut off.
        return last if last["attempt"] > before and _all_run(ndctl) else {}

    found = wait_for(resumed, f"the next attempt after {kind}")
    lost = max(0, reached - found["step"])
    return Recovery(kind=kind, in_memory=found.get("in_memory", False), lost_steps=lost)


def _kill(ndctl: Ndctl, draw: random.Random, kind: str) -> None:
    leader = ndctl.events("LeaderStarted")[-1]["pid"]
    agents = [one for one in processes(ndctl.run_dir) if one.pid != leader]
    wanted = "agent" if kind == "two hosts" else kind
    candidates = [process for process in agents if process.kind == wanted]
    count = 2 if kind == "two hosts" else 1
    for victim in draw.sample(candidates, min(count, len(candidates))):
        _end(victim)


def _end(victim: Process) -> None:
    # It may have just ended with what was killed before.
    with contextlib.suppress(ProcessLookupError):
        kill(victim.pid)


def undisturbed_losses(ndctl: Ndctl, last: int) -> Mapping[int, float]:
    """The losses of the same job without a kill, up to step `last`."""
    options = {**OPTIONS, "checkpoint__memory__every": "off", "train__steps": "100000"}
    done = ndctl.submit(**options)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: ndctl.num_steps() >= last, f"step {last}")
    assert ndctl("cancel", "e2e").code == 0
    assert_nothing_left(ndctl.run_dir)
    return ndctl.losses()


def check(folder: Path, kills: int, seed: int) -> list[Recovery]:
    """Kill, and compare all losses with those of an undisturbed job."""
    recoveries, losses = kill_randomly(Ndctl(folder / "killed"), kills, seed)
    assert sorted(losses) == list(range(1, max(losses) + 1))
    reference = undisturbed_losses(Ndctl(folder / "undisturbed"), max(losses))
    different = {step: loss for step, loss in losses.items() if loss != reference[step]}
    assert not different, f"losses differ: {different}"
    return recoveries


def table(recoveries: Sequence[Recovery]) -> str:
    by_kind: dict[str, list[Recovery]] = defaultdict(list)
    for one in recoveries:
        by_kind[one.kind].append(one)
    lines = ["kind         kills  from memory  lost steps: median  most"]
    for kind, found in sorted(by_kind.items()):
        lost = sorted(one.lost_steps for one in found)
        memory = sum(one.in_memory for one in found)
        middle = lost[len(lost) // 2]
        lines.append(f"{kind:12} {len(found):5}  {memory:11}  {middle:18}  {lost[-1]:4}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        recoveries = check(Path(folder), args.kills, args.seed)
    LOG.info("%s\n%d kills, all losses bitwise equal", table(recoveries), len(recoveries))


if __name__ == "__main__":
    main()
