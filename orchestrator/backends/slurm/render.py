"""Render a launch as a batch script, and the commands that start its agents. Pure.

The script contains the whole job. `ndctl submit` and a person give the same script to sbatch.
"""

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from orchestrator import run_module
from orchestrator.backends.slurm.on_nodes import embedded
from orchestrator.contract.files.access import umask_of
from orchestrator.contract.files.env import SRUN_OPTIONS
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.inventory.slurm.hostlist import fold

SRUN = (
    # The step continues if a node dies or a task exits, because the leader decides what to do.
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--open-mode=append",
    # One task per node starts all ranks. Without this, Slurm binds them to the cores of one task.
    "--cpu-bind=none",
)
SNAPSHOT, ENTRY = "snapshot", "orchestrator/run_module.py"
TASK = "orchestrator.backends.entry.slurm_task"
CLEAR_HOST = "orchestrator.backends.entry.slurm_clear_host"
BEFORE = "orchestrator.backends.entry.slurm_before_srun"
AFTER = "orchestrator.backends.entry.slurm_after_srun"
RUN_DIR = '"$run_dir"'
"""Shell variable in the script. The run directory of an array task includes its number."""
END = "END_OF_JOB"

Options = Sequence[tuple[str, str | int | bool | None]]


def job_name(launch: LaunchPlan) -> str:
    return f"ndctl-{launch.job}"


def mark(launch: LaunchPlan) -> str:
    """Start of the comment of the Slurm job, by which ndctl recognizes it."""
    return f"ndctl launch {launch.launch} of {launch.run_dir}"


def marked(launch: LaunchPlan, comment: str) -> str:
    """A comment with the mark of this launch in place of the mark of an earlier launch."""
    own = re.sub(r"\Andctl launch \d+ of [^;]*(; )?", "", comment.replace("(null)", ""))
    return f"{mark(launch)}; {own}" if own else mark(launch)


def folder(launch: LaunchPlan) -> Path:
    """The folder of this launch. Slurm job ids are not unique, because a reinstalled cluster starts
    at 1 again."""
    return RunDir(Path(launch.run_dir)).slurm / f"launch-{launch.launch}"


def script_path(launch: LaunchPlan) -> Path:
    return folder(launch) / "submission.sh"


def snapshot_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / SNAPSHOT


def submission(launch: LaunchPlan) -> list[str]:
    """The sbatch command. The output of the script goes to the run directory, not to the working
    directory of sbatch."""
    said = any(flag.startswith(("-o", "--output", "-e")) for flag in launch.slurm_spec.sbatch_args)
    output = [] if said else [f"--output={folder(launch) / '%j_batch.out'}"]
    return ["sbatch", "--parsable", *output, str(script_path(launch))]


def script(handover: Handover, python: str, cwd: Path) -> str:
    """The batch script.

    Args:
        python: the interpreter of the submitter.
        cwd: the folder for relative paths in the spec.
    """
    launch = handover.launch
    handover = replace(handover, job=replace(handover.job, at=0.0))
    sections = (
        ["#!/bin/bash"],
        _about(handover),
        _asked(launch),
        _needed(launch),
        _setup(launch, cwd),
        _run_dir(launch),
        _beginning(handover, python),
        _agents(launch, python),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


# What sbatch reads


def _work(handover: Handover) -> str:
    run = handover.job.run
    return f"{handover.job.steps:,} steps" if run is None else shlex.join(run.words)


def _about(handover: Handover) -> list[str]:
    launch, plan = handover.launch, handover.job.plan
    spares = len(launch.hosts) - len(plan.hosts)
    hosts = f"{len(plan.hosts)} hosts" + (f" and {spares} spare" if spares else "")
    return _comment(
        f"{launch.job}: {plan.world_size} ranks on {hosts} ({plan.mesh}), {_work(handover)}."
        f" Start it with `sbatch` and this file, or with `ndctl submit`. When it has"
        f" started, `ndctl status {launch.job}`, `logs`, `cancel` and the other commands find it in"
        f" {launch.run_dir}; set NDCTL_RUN_ROOT or --run-root."
    )


def _asked(launch: LaunchPlan) -> list[str]:
    spec = launch.slurm_spec
    options: Options = (
        ("job-name", job_name(launch)),
        ("comment", mark(launch) + (f"; {spec.comment}" if spec.comment else "")),
        ("nodes", len(launch.hosts)),
        ("ntasks-per-node", 1),
        ("partition", ",".join(spec.partitions) or None),
        ("account", spec.account),
        ("qos", spec.qos),
        ("reservation", spec.reservation),
        ("time", spec.time),
        *_devices(spec, launch.devices_per_host).items(),
        ("cpus-per-task", spec.cpus_per_task),
        ("mem", spec.mem),
        ("exclusive", spec.exclusive),
        ("constraint", spec.constraint),
        ("nodelist", spec.nodelist),
        ("exclude", ",".join(filter(None, (spec.exclude, *launch.exclude))) or None),
        ("switches", _switches(spec)),
        ("segment", spec.segment),
        ("licenses", spec.licenses),
        ("mail-type", spec.mail_type),
        ("mail-user", spec.mail_user),
    )
    about = _comment(
        "The Slurm options of the spec (cluster.slurm) and the nodes of the plan. ndctl finds the"
        " job by its comment."
    )
    return [*about, *_directives(options), *(f"#SBATCH {flag}" for flag in spec.sbatch_args)]


def _switches(spec: SlurmSpec) -> str | None:
    """Always with a time limit. Without it, the site's limit decides how long the job waits for a
    topology while other hosts are idle."""
    if spec.switches is None:
        return None
    if "@" in str(spec.switches):
        return str(spec.switches)
    return f"{spec.switches}@{spec.switch_wait}"


def _needed(launch: LaunchPlan) -> list[str]:
    notice = math.ceil(launch.slurm_spec.notice_s)
    about = _comment(
        f"Options that ndctl needs: to requeue the job, to continue when a node dies, and to get a"
        f" signal {notice} s before the time limit, so that the ranks write a checkpoint."
    )
    options: Options = (
        ("requeue", True),
        ("no-kill", True),
        ("signal", f"USR2@{notice}"),
        ("open-mode", "append"),
    )
    return [*about, *_directives(options)]


def _directives(options: Options) -> Iterator[str]:
    for name, value in options:
        if value is True:
            yield f"#SBATCH --{name}"
        elif value is not None and value is not False:
            yield f"#SBATCH --{name}={shlex.quote(str(value))}"


def _devices(spec: SlurmSpec, count: int) -> Mapping[str, str | None]:
    device = f"{spec.gpu_type}:{count}" if spec.gpu_type else str(count)
    match spec.gpus:
        case "per-node":
            return {"gpus-per-node": device, "gres": spec.gres}
        case "gres":
            return {"gres": ",".join(filter(None, (f"gpu:{device}", spec.gres)))}
        case "none":
            return {"gres": spec.gres}


# What the first node runs


def _setup(launch: LaunchPlan, cwd: Path) -> list[str]:
    spec = launch.slurm_spec
    where = shlex.quote(str(cwd))
    lines = [
        *_comment("Options of srun in the environment of sbatch do not change the job."),
        *textwrap.wrap(
            " ".join(SRUN_OPTIONS), 100, initial_indent="unset ", subsequent_indent="unset "
        ),
        "",
        *_comment("Relative paths in the spec and in cluster.slurm.setup start here."),
        f'cd {where} || echo "folder does not exist on $HOSTNAME: "{where} >&2',
    ]
    if (umask := umask_of(launch)) is not None:
        lines += ["", *_comment("From cluster.slurm.mode."), f"umask {umask:04o}"]
    if spec.env:
        lines += ["", *_comment("From cluster.slurm.env.")]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    if spec.modules or spec.setup:
        lines += ["", *_comment("From cluster.slurm.modules and cluster.slurm.setup.")]
    lines += [f"module load {shlex.quote(module)} || exit 1" for module in spec.modules]
    return [*lines, *spec.setup]


def _run_dir(launch: LaunchPlan) -> list[str]:
    root = shlex.quote(str(Path(launch.run_dir).parent))
    return [
        *_comment(
            "With `sbatch --array` each array task is a separate job with its number in the name."
        ),
        f"name={launch.job}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}",
        f"run_dir={root}/$name",
    ]


def _beginning(handover: Handover, python: str) -> list[str]:
    launch = handover.launch
    spec, copied = launch.slurm_spec, []
    # The snapshot may not exist yet: this program creates it.
    program = shlex.join(program_of(replace(spec, snapshot=False), launch, python, BEFORE))
    if spec.snapshot and not spec.container:
        program = f'{shlex.quote(python)} -P -u "$entry" {BEFORE}'
        copied = [
            f"entry={RUN_DIR}/{SNAPSHOT}/{ENTRY}",
            f'[ -e "$entry" ] || entry={shlex.quote(run_module.__file__)}',
        ]
    return [
        *_comment(
            "Create the run directory and the secret of the job, unless `ndctl submit` has done it."
            " Exit if another job has this name."
        ),
        *copied,
        f"{_in_container(launch)}{program} \\",
        f"  --run-dir={RUN_DIR} --script=\"$0\" <<'{END}' || exit",
        embedded.to_text(handover),
        END,
    ]


def _agents(launch: LaunchPlan, python: str) -> list[str]:
    # Each run of the job has its own files, because they show which agents failed to start.
    run = "${SLURM_RESTART_COUNT:-0}"
    logs = f"{RUN_DIR}/slurm/launch-{launch.launch}/%j-{run}_%t_log"
    which = f"--run-dir={RUN_DIR} --launch={launch.launch}"
    return [
        *_comment(
            "Start one agent per node. It starts and monitors the ranks of its node. The agent of"
            " the first node leads. Their logs are in logs/ of the run directory."
        ),
        "srun --unbuffered \\",
        f"  --output={logs}.out \\",
        f"  --error={logs}.err \\",
        f"  {shlex.join(_srun_args(launch.slurm_spec))} \\",
        f"  {_program(launch, python, TASK)} \\",
        f"  {which} --devices={launch.devices_per_host}"
        f" --agent-timeout={launch.agent_timeout} --first-leads"
        f"{''.join(f' {word}' for word in map(shlex.quote, hooks_of(launch)))} && exit",
        "",
        *_comment(
            "srun failed. If only srun was killed, wait for the agents, which keep running. If no"
            " agent is left to requeue the job, requeue it."
        ),
        f"{_in_container(launch)}{_program(launch, python, AFTER)} {which} --code=$?"
        ' --batch-output="$(readlink /proc/self/fd/2)"',
    ]


def hooks_of(launch: LaunchPlan, *, again: bool = False) -> list[str]:
    """`again`: for an agent that is restarted on a host where the before hook already ran."""
    hooks = launch.slurm_spec.hooks
    before = [f"--before={hooks.before}", f"--before-limit={hooks.timeout:g}"]
    after = [f"--after={hooks.after}", f"--after-limit={hooks.after_timeout:g}"]
    return [*(before if hooks.before and not again else []), *(after if hooks.after else [])]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        100,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,  # an option such as --run-root stays in one line
    )


def _srun_args(spec: SlurmSpec) -> list[str]:
    # Since 22.05 srun does not inherit --cpus-per-task from the batch job.
    cores = [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    return [*SRUN, *cores, *container_args(spec), *spec.srun_args]


def container_args(spec: SlurmSpec) -> list[str]:
    """Options of pyxis."""
    container = spec.container
    if container is None:
        return []
    given = {
        "image": container.image,
        "mounts": ",".join(container.mounts),
        "workdir": container.workdir or "",
        "env": ",".join((*container.env, *spec.env)),  # else the image's own values win
    }
    return [f"--container-{key}={value}" for key, value in given.items() if value]


def _in_container(launch: LaunchPlan) -> str:
    """Prefix for a program that the script runs: with a container, srun runs it in the container,
    because ndctl may be installed only there."""
    spec = launch.slurm_spec
    if spec.container is None:
        return ""
    place = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
    return shlex.join(["srun", *container_args(spec), *spec.srun_args, *place]) + " "


def _program(launch: LaunchPlan, python: str, module: str) -> str:
    """The command in the script, with the run directory as a variable."""
    words = program_of(launch.slurm_spec, launch, python, module)
    copy = str(snapshot_path(launch) / ENTRY)
    return " ".join(
        f"{RUN_DIR}/{SNAPSHOT}/{ENTRY}" if word == copy else shlex.quote(word) for word in words
    )


def program_of(spec: SlurmSpec, launch: LaunchPlan, python: str, module: str) -> list[str]:
    """The command of a module of ndctl on a node: from the snapshot, the container, or the
    installation of the submitter."""
    interpreter = spec.container.python if spec.container else python
    if spec.snapshot:
        return [interpreter, "-P", "-u", str(snapshot_path(launch) / ENTRY), module]
    if spec.container:
        return [interpreter, "-P", "-u", "-m", module]
    return [interpreter, "-P", "-u", run_module.__file__, module]


def replacement(launch: LaunchPlan, job_id: str, host: str, python: str) -> list[str]:
    """The command that restarts the agent of one host of the allocation."""
    out = str(folder(launch) / f"replaced-{host}.out")
    return [
        *_step(launch, job_id, host, python, TASK, f"--output={out}", "--open-mode=append"),
        *(f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"),
        *(f"--devices={launch.devices_per_host}", f"--agent-timeout={launch.agent_timeout}"),
        *hooks_of(launch, again=True),
    ]


def clearing(launch: LaunchPlan, job_id: str, host: str, python: str) -> list[str]:
    """The command that ends processes that an agent left on one host of the allocation."""
    step = _step(launch, job_id, host, python, CLEAR_HOST)
    return [*step, f"--run-dir={launch.run_dir}", f"--host={host}"]


def step_here(launch: LaunchPlan, hosts: Sequence[str], python: str) -> list[str]:
    """The command that starts all agents in an existing allocation, next to other steps."""
    spec, count = launch.slurm_spec, len(hosts)
    logs = str(folder(launch) / "%j.%s_%t_log")
    return [
        *("srun", "--unbuffered", f"--output={logs}.out", f"--error={logs}.err"),
        *_srun_args(spec),
        *("--overlap", f"--job-name={job_name(launch)}", f"--nodelist={fold(hosts)}"),
        *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *program_of(spec, launch, python, TASK),
        *(f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"),
        *(f"--devices={launch.devices_per_host}", f"--agent-timeout={launch.agent_timeout}"),
        "--first-leads",
        *hooks_of(launch),
    ]


def task_errors(launch: LaunchPlan, environ: Mapping[str, str], task: int) -> Path:
    """The stderr file of a task, which has its output before the agent opens its log. `environ`:
    of an agent in the same step."""
    job, run = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    here = folder(launch) / f"{job}.{environ.get('SLURM_STEP_ID', '')}_{task}_log.err"
    return here if here.exists() else folder(launch) / f"{job}-{run}_{task}_log.err"


def _step(
    launch: LaunchPlan, job_id: str, host: str, python: str, module: str, *options: str
) -> list[str]:
    """A module of ndctl as a step on one host, next to other steps."""
    spec = launch.slurm_spec
    place = [f"--jobid={job_id}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    options = (f"--job-name={job_name(launch)}", *options)
    return [
        *("srun", "--cpu-bind=none", *container_args(spec), *spec.srun_args),
        *(*place, *options),  # last, so that srun_args cannot change them
        *program_of(spec, launch, python, module),
    ]
