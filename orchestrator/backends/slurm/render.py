"""A launch as a batch script, and the commands that start its agents. Pure.

The script is the same whether `ndctl submit` or a person gives it to sbatch: it carries the job.
"""

import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator import run_module
from orchestrator.backends.slurm.on_nodes import embedded
from orchestrator.contract.files.access import umask_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.inventory.slurm.hostlist import fold

SRUN = (
    # The step goes on without a node that dies, and without a task that leaves: the leader decides.
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--open-mode=append",
    # One task a node: bound to its share of the cores, all ranks would sit on one of them.
    "--cpu-bind=none",
)
SNAPSHOT, ENTRY = "snapshot", "orchestrator/run_module.py"
TASK = "orchestrator.backends.entry.slurm_task"
CLEAR_HOST = "orchestrator.backends.entry.slurm_clear_host"
BEFORE = "orchestrator.backends.entry.slurm_before_srun"
AFTER = "orchestrator.backends.entry.slurm_after_srun"
RUN_DIR = '"$run_dir"'
"""As the script calls it: the run directory of an array's element has its number."""
END = "END_OF_JOB"

Options = Sequence[tuple[str, str | int | bool | None]]


def job_name(launch: LaunchPlan) -> str:
    return f"ndctl-{launch.job}"


def mark(launch: LaunchPlan) -> str:
    """What the comment of the Slurm job begins with, and no other job's does."""
    return f"ndctl launch {launch.launch} of {launch.run_dir}"


def marked(launch: LaunchPlan, comment: str) -> str:
    """A job's comment with the mark of this launch, and of none before it."""
    own = re.sub(r"\Andctl launch \d+ of [^;]*(; )?", "", comment.replace("(null)", ""))
    return f"{mark(launch)}; {own}" if own else mark(launch)


def folder(launch: LaunchPlan) -> Path:
    """Of this launch alone: job ids start again when a cluster is set up anew."""
    return RunDir(Path(launch.run_dir)).slurm / f"launch-{launch.launch}"


def script_path(launch: LaunchPlan) -> Path:
    return folder(launch) / "submission.sh"


def snapshot_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / SNAPSHOT


def submission(launch: LaunchPlan) -> list[str]:
    """How sbatch is given the script. What the batch script itself says goes to the run directory,
    which is there; by default Slurm writes it where sbatch was typed."""
    said = any(flag.startswith(("-o", "--output", "-e")) for flag in _spec(launch).sbatch_args)
    output = [] if said else [f"--output={folder(launch) / '%j_batch.out'}"]
    return ["sbatch", "--parsable", *output, str(script_path(launch))]


def script(handover: Handover, python: str, cwd: Path) -> str:
    """The batch script, to the letter; `python` is the submitter's own interpreter, and `cwd` the
    folder that paths in the spec are relative to."""
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


def _about(handover: Handover) -> list[str]:
    launch, plan = handover.launch, handover.job.plan
    spares = len(launch.hosts) - len(plan.hosts)
    hosts = f"{len(plan.hosts)} hosts" + (f", {spares} to spare" if spares else "")
    return _comment(
        f"{launch.job}: {plan.world_size} ranks on {hosts} ({plan.mesh}), {handover.job.steps:,}"
        f" steps. `sbatch` with this file starts it, as `ndctl submit` does; `ndctl status"
        f" {launch.job}`, `logs`, `cancel` and the others find it in {launch.run_dir}, once it has"
        " begun, with NDCTL_RUN_ROOT or --run-root."
    )


def _asked(launch: LaunchPlan) -> list[str]:
    spec = _spec(launch)
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
        "What the spec asks of Slurm (cluster.slurm), and the plan of the nodes. ndctl knows the"
        " job by its comment."
    )
    return [*about, *_directives(options), *(f"#SBATCH {flag}" for flag in spec.sbatch_args)]


def _switches(spec: SlurmSpec) -> str | None:
    """Always with a limit: without one the job waits beside idle hosts as long as the site says."""
    if spec.switches is None:
        return None
    if "@" in str(spec.switches):
        return str(spec.switches)
    return f"{spec.switches}@{spec.switch_wait}"


def _needed(launch: LaunchPlan) -> list[str]:
    notice = math.ceil(_spec(launch).notice_s)
    about = _comment(
        f"What ndctl needs: it has the job queued again, goes on without a node that dies, and"
        f" hears of the time limit {notice} s before, when ranks write a checkpoint."
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
    spec = _spec(launch)
    where = shlex.quote(str(cwd))
    lines = [
        *_comment("Paths in the spec, and in lines of cluster.slurm.setup, are relative to this."),
        f'cd {where} || echo "$HOSTNAME has no folder "{where} >&2',
    ]
    if (umask := umask_of(launch)) is not None:
        lines += ["", *_comment("cluster.slurm.mode."), f"umask {umask:04o}"]
    if spec.env:
        lines += ["", *_comment("cluster.slurm.env.")]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()]
    if spec.modules or spec.setup:
        lines += ["", *_comment("cluster.slurm.modules and setup.")]
    lines += [f"module load {shlex.quote(module)} || exit 1" for module in spec.modules]
    return [*lines, *spec.setup]


def _run_dir(launch: LaunchPlan) -> list[str]:
    root = shlex.quote(str(Path(launch.run_dir).parent))
    return [
        *_comment("With `sbatch --array` each element is a job of its own, with its number."),
        f"name={launch.job}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}",
        f"run_dir={root}/$name",
    ]


def _beginning(handover: Handover, python: str) -> list[str]:
    launch = handover.launch
    spec, copied = _spec(launch), []
    # Not from the snapshot alone, which may have to be made first.
    program = shlex.join(program_of(replace(spec, snapshot=False), launch, python, BEFORE))
    if spec.snapshot and not spec.container:
        program = f'{shlex.quote(python)} -P -u "$entry" {BEFORE}'
        copied = [
            f"entry={RUN_DIR}/{SNAPSHOT}/{ENTRY}",
            f'[ -e "$entry" ] || entry={shlex.quote(run_module.__file__)}',
        ]
    return [
        *_comment(
            "Make the run directory and in it the job's secret, where `ndctl submit` has not. End"
            " here where another job has the name."
        ),
        *copied,
        f"{_alone(launch)}{program} \\",
        f"  --run-dir={RUN_DIR} --script=\"$0\" <<'{END}' || exit",
        embedded.to_text(handover),
        END,
    ]


def _agents(launch: LaunchPlan, python: str) -> list[str]:
    # Of each run of the job its own: they say which agents could not begin in it.
    run = "${SLURM_RESTART_COUNT:-0}"
    logs = f"{RUN_DIR}/slurm/launch-{launch.launch}/%j-{run}_%t_log"
    which = f"--run-dir={RUN_DIR} --launch={launch.launch}"
    return [
        *_comment(
            "One agent on each node starts the ranks there and watches over them; that of the"
            " first node leads. What they say is in logs/ of the run directory."
        ),
        "srun --unbuffered \\",
        f"  --output={logs}.out \\",
        f"  --error={logs}.err \\",
        f"  {shlex.join(_srun_args(_spec(launch)))} \\",
        f"  {_program(launch, python, TASK)} \\",
        f"  {which} --devices={launch.devices_per_host}"
        f" --agent-timeout={launch.agent_timeout} --first-leads"
        f"{''.join(f' {word}' for word in map(shlex.quote, hooks_of(launch)))} && exit",
        "",
        *_comment(
            "It did not end well. Where srun alone was killed, wait for the agents that live on;"
            " where none is left that could, have the job queued again."
        ),
        f"{_alone(launch)}{_program(launch, python, AFTER)} {which} --code=$?",
    ]


def hooks_of(launch: LaunchPlan, *, again: bool = False) -> list[str]:
    """`again`: of an agent that is started again, on a host that has been made ready before."""
    hooks = _spec(launch).hooks
    before = [f"--before={hooks.before}", f"--before-limit={hooks.timeout:g}"]
    after = [f"--after={hooks.after}", f"--after-limit={hooks.after_timeout:g}"]
    return [*(before if hooks.before and not again else []), *(after if hooks.after else [])]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )


def _srun_args(spec: SlurmSpec) -> list[str]:
    # srun does not take over the batch job's number of cores (22.05 and newer).
    cores = [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    return [*SRUN, *cores, *container_args(spec), *spec.srun_args]


def container_args(spec: SlurmSpec) -> list[str]:
    """For pyxis."""
    container = spec.container
    if container is None:
        return []
    given = {
        "image": container.image,
        "mounts": ",".join(container.mounts),
        "workdir": container.workdir or "",
        "env": ",".join((*container.env, *spec.env)),  # or the image's own would win
    }
    return [f"--container-{key}={value}" for key, value in given.items() if value]


def _alone(launch: LaunchPlan) -> str:
    """Before a program that the script itself runs: with a container it runs there, for nothing of
    ours need be outside of it."""
    spec = _spec(launch)
    if spec.container is None:
        return ""
    place = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
    return shlex.join(["srun", *container_args(spec), *spec.srun_args, *place]) + " "


def _program(launch: LaunchPlan, python: str, module: str) -> str:
    """As the script starts it, which knows its run directory by a variable."""
    words = program_of(_spec(launch), launch, python, module)
    copy = str(snapshot_path(launch) / ENTRY)
    return " ".join(
        f"{RUN_DIR}/{SNAPSHOT}/{ENTRY}" if word == copy else shlex.quote(word) for word in words
    )


def program_of(spec: SlurmSpec, launch: LaunchPlan, python: str, module: str) -> list[str]:
    """How a module of ours is started on a node: from the snapshot or where it was submitted from,
    in a container from where that has it."""
    interpreter = spec.container.python if spec.container else python
    if spec.snapshot:
        return [interpreter, "-P", "-u", str(snapshot_path(launch) / ENTRY), module]
    if spec.container:
        return [interpreter, "-P", "-u", "-m", module]
    return [interpreter, "-P", "-u", run_module.__file__, module]


def replacement(launch: LaunchPlan, job_id: str, host: str, python: str) -> list[str]:
    """The command that starts the agent of one host of the allocation again."""
    out = str(folder(launch) / f"replaced-{host}.out")
    return [
        *_step(launch, job_id, host, python, TASK, f"--output={out}", "--open-mode=append"),
        *(f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"),
        *(f"--devices={launch.devices_per_host}", f"--agent-timeout={launch.agent_timeout}"),
        *hooks_of(launch, again=True),
    ]


def clearing(launch: LaunchPlan, job_id: str, host: str, python: str) -> list[str]:
    """The command that ends what an agent left on one host of the allocation."""
    step = _step(launch, job_id, host, python, CLEAR_HOST)
    return [*step, f"--run-dir={launch.run_dir}", f"--host={host}"]


def step_here(launch: LaunchPlan, hosts: Sequence[str], python: str) -> list[str]:
    """The command that starts all agents in an allocation that is there already, beside what else
    runs in it."""
    spec, count = _spec(launch), len(hosts)
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
    """What a task said before its agent's own log began; `environ` is of an agent of its step."""
    job, run = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "0")
    here = folder(launch) / f"{job}.{environ.get('SLURM_STEP_ID', '')}_{task}_log.err"
    return here if here.exists() else folder(launch) / f"{job}-{run}_{task}_log.err"


def _step(
    launch: LaunchPlan, job_id: str, host: str, python: str, module: str, *options: str
) -> list[str]:
    """A program of ours on one host, beside what runs there."""
    spec = _spec(launch)
    place = [f"--jobid={job_id}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    options = (f"--job-name={job_name(launch)}", *options)
    return [
        *("srun", "--cpu-bind=none", *container_args(spec), *spec.srun_args),
        *(*place, *options),  # last, whatever srun_args say of it
        *program_of(spec, launch, python, module),
    ]


def _spec(launch: LaunchPlan) -> SlurmSpec:
    return launch.slurm or SlurmSpec()
