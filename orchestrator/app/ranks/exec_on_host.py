"""`ndctl exec`: a command on a host of a running job, beside its ranks."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from orchestrator.app.remote import Found
from orchestrator.app.snapshots import snapshot_of
from orchestrator.contract.codec import nearest
from orchestrator.contract.files import env
from orchestrator.contract.launch import LaunchPlan
from orchestrator.dashboard.job_view.standing import Standing
from orchestrator.errors import JobError
from orchestrator.job.state import Run, hosts_given
from orchestrator.journal.journal import has_writer
from orchestrator.journal.snapshot import replay
from orchestrator.seams import Clock


def exec_on_host(
    found: Found, host: str | None, argv: Sequence[str], environ: Mapping[str, str], clock: Clock
) -> int:
    """Run `argv` with this terminal and return its exit code.

    Args:
        host: None: the only host of the job.

    Raises:
        JobError: the job does not run, or not on this host.
        BackendError: the cluster refuses, or is unreachable.
    """
    run, name = replay(found.run_dir), found.run_dir.path.name
    if run.job is None or run.ending is not None:
        raise JobError(
            f"job {name} is not running: {run.state}", fix=f"`ndctl logs {name}` has its logs"
        )
    if found.copy is None and not has_writer(found.run_dir.journal):
        _check_granted(snapshot_of(found, environ, clock).standing, name)
    chosen = _host(run, name, host)
    if found.copy is not None:
        # A pod has its own variables, so the shell's `env` sets these.
        named = [f"{name}={text}" for name, text in _names(run.job.launch, chosen).items()]
        argv = ["env", *named, *argv]
        outputs = _to(sys.stdout.fileno()), _to(sys.stderr.fileno())
        return found.copy.exec_on(chosen, argv, *outputs, _standard_input())
    if run.job.backend == "slurm":
        return _on_slurm(run.job.launch, name, chosen, argv, environ)
    from orchestrator.system import run_attached

    return run_attached(argv, {**environ, **_names(run.job.launch, chosen)})


def _check_granted(standing: Standing, name: str) -> None:
    """Raises JobError for a job that waits for hosts: those of its plan are only names."""
    if standing.state == "PENDING":
        raise JobError(
            f"job {name} has no hosts yet: PENDING, {standing.reason}",
            fix=f"try again when `ndctl status {name}` says that it runs",
        )


def _host(run: Run, name: str, host: str | None) -> str:
    hosts = hosts_given(run)
    if host in hosts:
        return str(host)
    listed = ", ".join(hosts[:10]) + (f" and {len(hosts) - 10:,} more" if len(hosts) > 10 else "")
    if host is None:
        if len(hosts) == 1:
            return hosts[0]
        raise JobError(
            f"job {name} has {len(hosts):,} hosts", fix=f"choose one with --host: {listed}"
        )
    near = nearest(host, hosts)
    fix = f"did you mean {near}?" if near else f"its hosts: {listed}"
    raise JobError(f"job {name} does not use host {host}", fix=fix)


def _names(launch: LaunchPlan, host: str) -> dict[str, str]:
    return {env.RUN_DIR: launch.run_dir, env.HOST: host}


def _on_slurm(
    launch: LaunchPlan, name: str, host: str, argv: Sequence[str], environ: Mapping[str, str]
) -> int:
    from orchestrator.backends.slurm.job_lookup import recorded
    from orchestrator.system import run_attached

    job_id = recorded(launch)
    if job_id is None:
        raise JobError(f"the Slurm job of {name} is not known here", fix=f"ndctl status {name}")
    step = srun_command(job_id, host, argv, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    return run_attached(step, env.without_slurm_options({**environ, **_names(launch, host)}))


def srun_command(job_id: str, host: str, argv: Sequence[str], *, terminal: bool) -> list[str]:
    """A step in the job's allocation that takes nothing from the ranks: with `--overlap` it shares
    their CPUs, memory and devices."""
    return [
        *("srun", f"--jobid={job_id}", "--overlap", f"--nodelist={host}"),
        *("--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--quiet"),
        *(["--pty"] if terminal else []),
        *argv,
    ]


def _standard_input() -> int | None:
    """The descriptor of the standard input; None if it is closed, or a terminal that another
    program reads: the kernel stops a background process that reads its terminal."""
    if sys.stdin is None:
        return None
    descriptor = sys.stdin.fileno()
    if os.isatty(descriptor) and os.tcgetpgrp(descriptor) != os.getpgrp():
        return None
    return descriptor


def _to(descriptor: int) -> Callable[[bytes], object]:
    """Writes bytes as they are: the output may be a file of the user's own."""

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write
