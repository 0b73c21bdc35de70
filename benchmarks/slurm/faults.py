"""What happens to a job on a real Slurm at each fault: one row of a table per fault.

    python -m benchmarks.slurm.faults [FAULT...]

A job of 2 hosts x 1 rank, a checkpoint every ten steps, on a testbed of 4 nodes with Slurm's
default KillWait. Seconds are counted from the fault to the first step of the next attempt. `lost`
are steps that were repeated, and `left` are processes and Slurm steps that remain after the job was
cancelled. A repeated step must have the same loss, bit by bit.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs.local import metrics_of, rank_pid, redone
from benchmarks.jobs.slurm import LOSS, SMALL, Job, nodes_of, run, under_ndctl, wait_for
from benchmarks.measure.timing import machine
from tests.e2e.job import processes_of
from tests.slurm.e2e.slurm_job import DAEMONS
from tests.slurm.testbed import SlurmTestbed, running_testbed

CUT_S = SUSPENDED_S = 25.0
SPARE = "--set=cluster.spare_hosts=1"
Fault = Callable[[SlurmTestbed, Job], None]


def kill_rank(testbed: SlurmTestbed, job: Job) -> None:
    os.kill(rank_pid(job.folder, 1), signal.SIGKILL)


def kill_agent(testbed: SlurmTestbed, job: Job) -> None:
    os.kill(agent_pid(job, nodes_of(testbed, job)[1]), signal.SIGKILL)


def kill_leader(testbed: SlurmTestbed, job: Job) -> None:
    os.kill(agent_pid(job, nodes_of(testbed, job)[0]), signal.SIGKILL)


def kill_srun(testbed: SlurmTestbed, job: Job) -> None:
    """The first of the two that there are: the second one ends the step then."""
    found = [pid for pid, line in processes_of(job.folder).items() if line.startswith("srun ")]
    (first,) = (pid for pid in found if parent_of(pid) not in found)
    os.kill(first, signal.SIGKILL)


def kill_batch_shell(testbed: SlurmTestbed, job: Job) -> None:
    name = f"job{int(job.id):05}/slurm_script"
    places = Path("/proc").glob("[0-9]*")
    mine = [int(place.name) for place in places if name in command_of(place)]
    (shell,) = (pid for pid in mine if parent_of(pid) not in mine)
    os.kill(shell, signal.SIGKILL)


def kill_other_node(testbed: SlurmTestbed, job: Job) -> None:
    testbed.kill_node(nodes_of(testbed, job)[1])


def kill_first_node(testbed: SlurmTestbed, job: Job) -> None:
    testbed.kill_node(nodes_of(testbed, job)[0])


def kill_slurmd(testbed: SlurmTestbed, job: Job) -> None:
    """Its steps live on."""
    node = nodes_of(testbed, job)[1]
    os.kill(int((testbed.folder / "run" / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)


def cut_off_leader(testbed: SlurmTestbed, job: Job) -> None:
    node = nodes_of(testbed, job)[0]
    testbed.net_down(node)
    time.sleep(CUT_S)
    testbed.net_up(node)


def suspend(testbed: SlurmTestbed, job: Job) -> None:
    testbed.output_of("scontrol", "suspend", job.id)
    time.sleep(SUSPENDED_S)
    testbed.output_of("scontrol", "resume", job.id)


FAULTS: dict[str, tuple[str, Fault, tuple[str, ...]]] = {
    "rank": ("kill -9 of a rank", kill_rank, ()),
    "agent": ("kill -9 of an agent that does not lead", kill_agent, ()),
    "leader": ("kill -9 of the leader's agent", kill_leader, ()),
    "srun": ("kill -9 of srun", kill_srun, ()),
    "batch": ("kill -9 of the batch shell", kill_batch_shell, ()),
    "spare": ("slurmd and steps of the second node, with a spare", kill_other_node, (SPARE,)),
    "other": ("slurmd and steps of the second node", kill_other_node, ()),
    "first": ("slurmd and steps of the first node", kill_first_node, ()),
    "slurmd": ("slurmd alone of the second node", kill_slurmd, ()),
    "cut": (f"network of the first node, {CUT_S:.0f} s", cut_off_leader, ()),
    "suspend": (f"scontrol suspend, resume after {SUSPENDED_S:.0f} s", suspend, ()),
}
COLUMNS = ("fault", "outcome", "culprit", "excluded", "s", "lost steps", "same losses", "left")


def main(names: list[str]) -> None:
    print(machine())
    with running_testbed(nodes=4, gpus=2, knobs=LOSS) as testbed:
        print(f"{testbed.output_of('sinfo', '--version')}, load {os.getloadavg()[0]:.1f} before")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for name in names or FAULTS:
            what, fault, options = FAULTS[name]
            testbed.restore()
            with tempfile.TemporaryDirectory() as folder:
                cells = suffered(testbed, Path(folder), fault, options)
            print(f"| {what} | {' | '.join(cells)} |", flush=True)


def suffered(
    testbed: SlurmTestbed, root: Path, fault: Fault, options: tuple[str, ...]
) -> list[str]:
    with under_ndctl(testbed, root, *SMALL, *options) as job:
        job.await_step()
        job.await_checkpoint()
        begun = time.perf_counter()
        fault(testbed, job)
        same = fault is suspend
        known = job.steps
        try:
            new = wait_for(lambda: job.steps > known if same else later_steps(job))
            seconds = f"{new - begun - (SUSPENDED_S if same else 0.0):.1f}"
        except TimeoutError:
            seconds = "-"
        told = about(testbed, job)
    left = [*processes_of(job.folder).values(), *steps_of(testbed)]
    return [*told[:3], seconds, *told[3:], str(len(left)) if left else "none"]


def later_steps(job: Job) -> list[int]:
    return [line["step"] for line in metrics_of(job.folder) if line["attempt"] > 1]


def about(testbed: SlurmTestbed, job: Job) -> list[str]:
    """Outcome, culprit, what is excluded from now on, steps done twice and whether alike."""
    leaders = job.events("LeaderStarted")
    runs = {one["allocation"]["restarts"] for one in leaders}
    where = "queued again" if len(runs) > 1 else "same allocation"
    who = ", another leader" if len(runs) == 1 and len(leaders) > 1 else ""
    resumed = "goes on as it was" if not later_steps(job) else f"{where}{who}"
    root = f"--run-root={job.folder.parent}"
    shown = run(testbed, (sys.executable, "-m", "orchestrator", "describe", job.folder.name, root))
    culprits = [line.split(None, 1)[1] for line in shown.splitlines() if _is_culprit(line)]
    slurm = testbed.output_of("scontrol", "show", "job", "-o", job.id).split()
    excluded = next(word for word in slurm if word.startswith("ExcNodeList=")).partition("=")[2]
    twice, alike = redone(metrics_of(job.folder))
    return [
        resumed,
        "; ".join(culprits) or "nobody",
        "nobody" if excluded == "(null)" else excluded,
        str(twice),
        "yes" if alike else "NO",
    ]


def _is_culprit(line: str) -> bool:
    return line.strip().startswith("culprit ")


def steps_of(testbed: SlurmTestbed) -> list[str]:
    lines = [line for line in testbed.leftovers() if line.startswith("process ")]
    return [line for line in lines if not DAEMONS.fullmatch(line.split()[-1].strip("()"))]


def agent_pid(job: Job, node: str) -> int:
    return int((job.folder / "logs" / f"agent-{node}.lock").read_text())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])


def command_of(place: Path) -> str:
    try:
        return (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
