"""A launch as submitit's parameters, and the batch script that submitit makes of them. Pure.

submitit is imported late: `ndctl --help` and the local backend do without it.
"""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.rundir import RunDir
from orchestrator.contract.slurm import ContainerSpec, SlurmSpec

SRUN = (
    # The step goes on without a node that dies, and without a task that leaves: the leader decides.
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--open-mode=append",
    # One task a node: bound to its share of the cores, all ranks would sit on one of them.
    "--cpu-bind=none",
)
SNAPSHOT = "snapshot"
TASK = "task.pkl"


def job_name(launch: LaunchPlan) -> str:
    return f"ndctl-{launch.job}"


def mark(launch: LaunchPlan) -> str:
    """What the comment of the Slurm job begins with, and no other job's does."""
    return f"ndctl launch {launch.launch} of {launch.run_dir}"


def folder(launch: LaunchPlan) -> Path:
    """submitit's, of this launch alone: job ids start again when a cluster is set up anew."""
    return RunDir(Path(launch.run_dir)).slurm / f"launch-{launch.launch}"


def script_path(launch: LaunchPlan) -> Path:
    return folder(launch) / "submission.sh"


def snapshot_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / SNAPSHOT


def script(launch: LaunchPlan, python: str) -> str:
    """The batch script, to the letter; `python` is the submitter's own interpreter."""
    from submitit.slurm.slurm import _make_sbatch_string

    made: str = _make_sbatch_string(
        command=_command(launch, python), folder=folder(launch), **parameters(launch)
    )
    return made


def _command(launch: LaunchPlan, python: str) -> str:
    """What submitit's executor would run, its runner, which loads the pickled task; and what is
    run where that did not end well."""
    container = _spec(launch).container
    runner = [container.python if container else python, "-P", "-u", "-m", "submitit.core._submit"]
    after = shlex.join(_after_srun(launch, python))
    return f"{shlex.join([*runner, str(folder(launch))])} || {after} --code=$?"


def _after_srun(launch: LaunchPlan, python: str) -> list[str]:
    """In the container, where there is one: nothing of ours need be outside of it."""
    container, inside = _spec(launch).container, []
    if container:
        python = container.python
        place = ["--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none"]
        inside = ["srun", *container_args(container), *_spec(launch).srun_args, *place]
    module = [python, "-P", "-m", "orchestrator.backends.slurm.after_srun"]
    return [*inside, *module, f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"]


def _spec(launch: LaunchPlan) -> SlurmSpec:
    return launch.slurm or SlurmSpec()


def parameters(launch: LaunchPlan) -> dict[str, Any]:
    """In submitit's names; what it has no name for is under `additional_parameters`."""
    spec = _spec(launch)
    return {
        "job_name": job_name(launch),
        "comment": mark(launch) + (f"; {spec.comment}" if spec.comment else ""),
        "nodes": len(launch.hosts),
        "ntasks_per_node": 1,
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "time": spec.time,
        "mem": spec.mem,
        "cpus_per_task": spec.cpus_per_task,
        "exclusive": spec.exclusive or None,
        "constraint": spec.constraint,
        "nodelist": spec.nodelist,
        "exclude": ",".join(filter(None, (spec.exclude, *launch.exclude))) or None,
        "mail_type": spec.mail_type,
        "mail_user": spec.mail_user,
        "wckey": None,  # submitit's own would be refused where keys are tracked
        "signal_delay_s": math.ceil(spec.notice_s),
        "setup": _setup(launch, spec),
        "srun_args": _srun_args(spec),
        "additional_parameters": _more(spec),
        **_devices(spec, launch.devices_per_host),
    }


def _devices(spec: SlurmSpec, count: int) -> Mapping[str, str | None]:
    device = f"{spec.gpu_type}:{count}" if spec.gpu_type else str(count)
    match spec.gpus:
        case "per-node":
            return {"gpus_per_node": device, "gres": spec.gres}
        case "gres":
            return {"gres": ",".join(filter(None, (f"gpu:{device}", spec.gres)))}
        case "none":
            return {"gres": spec.gres}


def _more(spec: SlurmSpec) -> dict[str, Any]:
    given = {
        "reservation": spec.reservation,
        "licenses": spec.licenses,
        "switches": spec.switches,
        "segment": spec.segment,
    }
    said = {key: value for key, value in given.items() if value is not None}
    signal = {"signal": f"USR2@{math.ceil(spec.notice_s)}"}  # whatever the environment says
    return {"no-kill": True, "requeue": True, **signal, **said}


def _setup(launch: LaunchPlan, spec: SlurmSpec) -> list[str]:
    """Lines of shell before srun; the first ones are still sbatch's."""
    here = folder(launch)
    lines = [f"#SBATCH {flag}" for flag in spec.sbatch_args]
    # submitit looks for its pickle by job id. Linked here, not by the submitter after sbatch has
    # answered: the job needs nobody who might be gone by then.
    task = shlex.quote(str(here / TASK))
    lines.append(f'ln -sf {task} {shlex.quote(str(here))}/"$SLURM_JOB_ID"_submitted.pkl')
    lines += [f"module load {shlex.quote(module)} || exit 1" for module in spec.modules]
    if spec.snapshot:
        code = shlex.quote(str(snapshot_path(launch)))
        # The safe path: or `python -m` would look into the present folder first.
        lines.append(f'export PYTHONSAFEPATH=1 PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return [*lines, *spec.setup]


def _srun_args(spec: SlurmSpec) -> list[str]:
    # srun does not take over the batch job's number of cores (22.05 and newer).
    cores = [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    return [*SRUN, *cores, *container_args(spec.container), *spec.srun_args]


def container_args(container: ContainerSpec | None) -> list[str]:
    """For pyxis."""
    if container is None:
        return []
    given = {
        "image": container.image,
        "mounts": ",".join(container.mounts),
        "workdir": container.workdir or "",
        "env": ",".join(container.env),
    }
    return [f"--container-{key}={value}" for key, value in given.items() if value]


def replacement(launch: LaunchPlan, job_id: str, host: str, python: str) -> list[str]:
    """The command that starts the agent of one host of the allocation again."""
    spec = _spec(launch)
    place = [f"--jobid={job_id}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    out = str(folder(launch) / f"replaced-{host}.out")
    python = spec.container.python if spec.container else python
    agent = [python, "-P", "-u", "-m", "orchestrator.backends.slurm.task"]
    return [
        *("srun", "--cpu-bind=none", "--open-mode=append"),
        *(*container_args(spec.container), *spec.srun_args),
        *(*place, f"--output={out}"),  # whatever srun_args say of it
        *(*agent, f"--run-dir={launch.run_dir}", f"--launch={launch.launch}"),
        *(f"--devices={launch.devices_per_host}", f"--agent-timeout={launch.agent_timeout}"),
    ]
