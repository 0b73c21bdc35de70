"""Check this login node and its Slurm cluster. Read-only."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.backends.slurm.commands import Slurm, without_munge
from orchestrator.backends.slurm.inventory import PARTITIONS
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.errors import BackendError
from orchestrator.health.mounts import mount_of
from orchestrator.inventory.slurm.config import parse_config
from orchestrator.inventory.slurm.partitions import (
    Partition,
    not_up_fix,
    parse_partitions,
    time_words,
)
from orchestrator.seams import Completed

TIMEOUT_S = 15.0
"""The commands themselves give up after 4 to 8 s if slurmctld is down."""
COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "sinfo", "scancel")
OLDEST = (22, 5)
"""The oldest tested version."""
KILL_WAIT_S = 30
"""Seconds; Slurm's default. With less, ranks cannot finish a write."""
LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"}
)

Config = Mapping[str, str]


def examine_slurm(
    run_root: Path, spec: SlurmSpec, slurm: Slurm, mounts: str
) -> tuple[Finding, ...]:
    """All checks. `mounts`: the result of `read_mounts`."""
    return (
        *_commands(slurm),
        *_cluster(spec, slurm),
        _shared(run_root, mounts),
    )


def _ask(slurm: Slurm, *argv: str) -> Completed:
    """Without retries; no answer counts as a failure."""
    try:
        return slurm.ask(argv, tries=1, answer_s=TIMEOUT_S)
    except BackendError as exc:
        return Completed(1, "", exc.message)


def _commands(slurm: Slurm) -> Iterator[Finding]:
    asked = {command: _ask(slurm, command, "--version") for command in COMMANDS}
    missing = [command for command, done in asked.items() if done.code != 0]
    if missing:
        yield Finding(
            what="commands",
            verdict="stops",
            found=f"{', '.join(missing)} cannot be run: {_said(asked[missing[0]])}",
            fix="run this on a login node of the cluster, or add the Slurm commands to PATH",
        )
        return
    text = asked["sbatch"].out.strip()
    version = parse_version(text)
    wanted = ".".join(f"{part:02}" for part in OLDEST)
    if version is None or version < OLDEST:
        fix = f"ndctl is tested with Slurm {wanted} and newer"
        yield Finding(what="commands", verdict="warns", found=text, fix=fix)
        return
    yield Finding(what="commands", verdict="ok", found=text)


def parse_version(text: str) -> tuple[int, int] | None:
    """`slurm-wlm 22.05.8` or `slurm 24.11.1` as (22, 5) or (24, 11)."""
    found = re.search(r"\b(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _said(done: Completed) -> str:
    return (done.err or done.out).strip().partition("\n")[0] or f"exit code {done.code}"


def _cluster(spec: SlurmSpec, slurm: Slurm) -> Iterator[Finding]:
    shown = _ask(slurm, "scontrol", "show", "config")
    if without := without_munge(shown):
        yield Finding(what="controller", verdict="stops", found=without.message, fix=without.fix)
        return
    if shown.code != 0:
        yield Finding(
            what="controller",
            verdict="stops",
            found=_said(shown),
            fix="wait until slurmctld is up (`scontrol ping`), or check SLURM_CONF",
        )
        return
    config = parse_config(shown.out)
    name = config.get("ClusterName", "unknown")
    found = f"cluster {name}, Slurm {config.get('SLURM_VERSION', 'of unknown version')}"
    yield Finding(what="controller", verdict="ok", found=found)
    partitions = _ask(slurm, *PARTITIONS)
    yield judge_partition(spec.partitions, parse_partitions(partitions.out))
    yield _accounting(config, slurm)
    yield from judge_config(config, spec)


def judge_partition(asked: Sequence[str], partitions: Sequence[Partition]) -> Finding:
    names = ", ".join(one.name for one in partitions) or "none"
    fix = "set cluster.slurm.partition to one of these"
    wanted = asked or [one.name for one in partitions if one.default]
    there = [one for one in partitions if one.name in wanted]
    missing = [one for one in wanted if one not in {found.name for found in there}]
    if missing or not there:
        lacks = f"unknown partition {', '.join(missing)}; partitions: {names}"
        found = lacks if missing else f"no default partition; partitions: {names}"
        return Finding(what="partition", verdict="stops", found=found, fix=fix)
    chosen = next((one for one in there if one.state == "UP"), there[0])
    name, state = chosen.name, chosen.state
    found = f"{name} is {state}, time limit {time_words(chosen.max_time_s)}"
    if state != "UP":
        return Finding(what="partition", verdict="stops", found=found, fix=not_up_fix(name))
    return Finding(what="partition", verdict="ok", found=found)


def _accounting(config: Config, slurm: Slurm) -> Finding:
    """ndctl does not need accounting. Without it the end of a job is known for MinJobAge."""
    kind = config.get("AccountingStorageType", "accounting_storage/none")
    if kind.endswith("/none"):
        kept = config.get("MinJobAge", "unknown")
        found = f"none; squeue shows a job for {kept} after its end"
        return Finding(what="accounting", verdict="note", found=found)
    done = _ask(slurm, "sacct", "-n", "-X", "--starttime", "now-1minutes")
    if done.code == 0:
        return Finding(what="accounting", verdict="ok", found="sacct works")
    fix = "jobs run without it; ask your admins to check slurmdbd"
    return Finding(what="accounting", verdict="warns", found=_said(done), fix=fix)


def judge_config(config: Config, spec: SlurmSpec) -> Iterator[Finding]:
    """Check the site's settings that affect recovery. Pure."""
    yield _requeue(config)
    yield _preemption(config, spec)
    yield _kill_wait(config)
    if "Prolog" in config:
        yield _prolog(config)
    timeout = config.get("SlurmdTimeout", "unknown")
    yield Finding(
        what="dead nodes",
        verdict="note",
        found=f"Slurm detects one after {timeout}, ndctl after resilience.agent_timeout",
    )
    wait = _number(config.get("WaitTime", "0"))
    if wait:
        found = f"WaitTime={wait} s: srun ends a step this long after its first task exits"
        yield Finding(what="wait time", verdict="note", found=f"{found}; ndctl uses --wait=0")


def _requeue(config: Config) -> Finding:
    codes = config.get("RequeueExit")
    found = f"JobRequeue={config.get('JobRequeue', '0')}"
    if codes:
        found += f", RequeueExit={codes}"
    if config.get("JobRequeue") == "1":
        return Finding(what="requeue", verdict="ok", found=found)
    fix = "nothing if the site lets jobs set --requeue, as ndctl does; else set JobRequeue=1"
    return Finding(what="requeue", verdict="note", found=found, fix=fix)


def _preemption(config: Config, spec: SlurmSpec) -> Finding:
    mode, kind = config.get("PreemptMode", "OFF"), config.get("PreemptType", "preempt/none")
    found = f"PreemptMode={mode}, {kind}"
    if mode == "OFF" or kind.endswith("/none"):
        return Finding(what="preemption", verdict="ok", found=found)
    if "SUSPEND" in mode or "GANG" in mode:
        fix = "a suspended job writes no checkpoint and keeps its GPU memory; use a partition"
        fix += " with PreemptMode=REQUEUE"
        return Finding(what="preemption", verdict="warns", found=found, fix=fix)
    warned = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
    if "CANCEL" in mode:
        found += "; a job preempted without a GraceTime ends as PREEMPTED and is not requeued"
        fix = "ask for PreemptMode=REQUEUE, or for a GraceTime" + (
            "" if warned else " and SlurmctldParameters=preempt_send_user_signal"
        )
        fix += "; until then run `ndctl submit SPEC --resume` after a preemption"
        return Finding(what="preemption", verdict="warns", found=found, fix=fix)
    if warned:
        found += f"; ranks are warned up to {spec.notice_s:.0f} s before, as GraceTime allows"
        return Finding(what="preemption", verdict="ok", found=found)
    fix = "ask for SlurmctldParameters=preempt_send_user_signal and a GraceTime; until then a"
    fix += " preempted job resumes from its last checkpoint (checkpoint.every_steps)"
    return Finding(what="preemption", verdict="warns", found=found, fix=fix)


def _kill_wait(config: Config) -> Finding:
    wait = _number(config.get("KillWait", ""))
    if wait is None:
        return Finding(what="kill wait", verdict="note", found="unknown")
    found = f"{wait} s between SIGTERM and SIGKILL"
    if wait >= KILL_WAIT_S:
        return Finding(what="kill wait", verdict="ok", found=found)
    fix = f"ask for KillWait={KILL_WAIT_S}; a checkpoint that takes longer is incomplete"
    return Finding(what="kill wait", verdict="warns", found=found, fix=fix)


def _prolog(config: Config) -> Finding:
    """By default Slurm holds a batch job whose Prolog failed until a person releases it."""
    found = f"{config['Prolog']} checks nodes before a job"
    if "nohold_on_prolog_fail" in config.get("SchedulerParameters", ""):
        return Finding(what="prolog", verdict="ok", found=found)
    return Finding(
        what="prolog",
        verdict="warns",
        found=f"{found}; if it fails, Slurm holds the job",
        fix="ask for SchedulerParameters=nohold_on_prolog_fail, or run `scontrol release JOB`",
    )


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else None


def _shared(run_root: Path, mounts: str) -> Finding:
    """The run root must be shared by the leader, the agents and the login nodes."""
    place = run_root.absolute()
    mount = mount_of(mounts, place)
    kind = "an unknown file system" if mount is None else mount.kind
    if kind not in LOCAL_FILE_SYSTEMS:
        return Finding(what="shared root", verdict="ok", found=f"{place} is on {kind}")
    return Finding(
        what="shared root",
        verdict="warns",
        found=f"{place} is on {kind}, which is local to this node",
        fix="set --run-root (or run_root) to a directory on a file system that all nodes share",
    )
