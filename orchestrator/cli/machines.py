"""Commands for machines: `doctor`, `hosts`, `calibrate`."""

import os
import sys
from typing import TYPE_CHECKING, Literal

import click

from orchestrator.cli.options import (
    BACKENDS,
    json_option,
    plan_for,
    print_json,
    resume_option,
    root_option,
    say,
    set_option,
    warn_of_settings,
)
from orchestrator.cli.usage.sections import WholeSentences

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.contract.check_results import Finding
    from orchestrator.contract.spec.job_spec import CommonSpec
    from orchestrator.dashboard.fleet.host_table import HostUse


CALIBRATE_S, LEAST_S, MOST_S = 90.0, 5.0, 150.0
"""Seconds of `ndctl calibrate`: by default, least and most."""


def _spec_of(spec: str | None, overrides: tuple[str, ...]) -> "CommonSpec | None":
    from pathlib import Path

    from orchestrator.load import read_spec

    if spec is None:
        return None
    wish = read_spec(Path(spec), overrides, os.environ)
    warn_of_settings(wish)
    return wish


def _input_findings(
    spec: str, overrides: tuple[str, ...], root: "Path", *, resume: bool
) -> "tuple[Finding, ...]":
    """Checks of the data, tokenizer, weights, and of the checkpoint to resume from."""
    from pathlib import Path

    from orchestrator.app.planning.plans import look_at
    from orchestrator.app.submission.inputs import findings_of
    from orchestrator.load import read_written

    written = read_written(Path(spec), overrides, os.environ)
    return findings_of(look_at(written, os.environ, root, resume=resume), written)


def _slurm_findings(
    spec: str | None, overrides: tuple[str, ...], root: "Path"
) -> "tuple[Finding, ...]":
    """With a spec, also the checks of `submit`, unless the site itself stops every job."""
    from pathlib import Path

    from msgspec.structs import replace

    from orchestrator.app.planning import plans
    from orchestrator.app.schedulers import submitter_of
    from orchestrator.app.submission import payload, submit_job
    from orchestrator.backends.slurm.commands import Slurm
    from orchestrator.contract.check_results import Finding
    from orchestrator.contract.spec.slurm_spec import SlurmSpec
    from orchestrator.doctor.slurm import examine_slurm
    from orchestrator.errors import NdctlError, Unanswered
    from orchestrator.health.mounts import read_mounts
    from orchestrator.load import read_spec
    from orchestrator.system import SystemClock, run_command

    clock = SystemClock()
    asked = read_spec(Path(spec), overrides, os.environ).cluster.slurm if spec else SlurmSpec()
    found = examine_slurm(root, asked, Slurm(run_command, clock), read_mounts())
    if spec is None or any(one.verdict == "stops" for one in found):
        return found
    try:
        planned = plans.plan_spec(Path(spec), overrides, os.environ, purpose="submit")
        submission = payload.Submission(planned=planned, run_root=root)
        handover = submit_job.first_handover(submission, os.environ, clock)
        checked = submitter_of("slurm", os.environ, clock).check(handover)
    except Unanswered:
        return found
    except NdctlError as exc:
        return (*found, Finding(what="submit", verdict="stops", found=exc.message, fix=exc.fix))
    tested = (replace(one, what="submit", found=f"{one.what}: {one.found}") for one in checked)
    notes = (Finding(what="cluster", verdict="note", found=note) for note in planned.notes)
    return (*found, *tested, *notes)


def _kubernetes_findings(
    spec: str | None, overrides: tuple[str, ...], root: "Path"
) -> "tuple[Finding, ...]":
    """With a spec, also the checks of `submit`."""
    from pathlib import Path

    from orchestrator.app.planning import plans
    from orchestrator.app.planning.planned_hosts import kubernetes_api
    from orchestrator.app.submission import payload, submit_job
    from orchestrator.contract.check_results import Finding
    from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
    from orchestrator.doctor.kubernetes import Job, examine_kubernetes, no_api_server
    from orchestrator.errors import NdctlError, Unanswered, Unreachable
    from orchestrator.inventory.kubernetes.gpus import gpu_table
    from orchestrator.load import read_spec
    from orchestrator.system import SystemClock

    if spec is None:
        return examine_kubernetes(kubernetes_api(None, os.environ), KubernetesSpec())
    asked = read_spec(Path(spec), overrides, os.environ).cluster.kubernetes
    api = kubernetes_api(asked.context, os.environ)
    try:
        planned = plans.plan_spec(Path(spec), overrides, os.environ, purpose="submit")
    except Unreachable as exc:
        return (no_api_server(exc),)  # the next question would wait as long
    except Unanswered:
        return examine_kubernetes(api, asked)
    except NdctlError as exc:
        found = examine_kubernetes(api, asked)
        refused = Finding(what="plan", verdict="stops", found=exc.message, fix=exc.fix)
        # What stops each request stops the plan too.
        return found if no_api_server(exc) in found else (*found, refused)
    submission = payload.Submission(planned=planned, run_root=root)
    handover = submit_job.first_handover(submission, os.environ, SystemClock())
    job = Job(handover, gpu_table(os.environ))
    notes = (Finding(what="cluster", verdict="note", found=note) for note in planned.notes)
    return (*examine_kubernetes(api, planned.spec.cluster.kubernetes, job), *notes)


@click.command(epilog="Example: ndctl doctor examples/quickstart.yaml")
@click.argument("spec", required=False)
@set_option
@root_option
@click.option("--backend", type=BACKENDS, help="Backend to check. [from the spec]")
@json_option
@resume_option
def doctor(
    spec: str | None,
    overrides: tuple[str, ...],
    run_root: str | None,
    backend: str | None,
    as_json: bool,
    resume: bool,
) -> None:
    """Check this machine and its cluster for problems that would stop a job.

    With SPEC, check for that job.
    """
    from orchestrator.contract.codec import encode
    from orchestrator.health.machine import describe_findings, examine
    from orchestrator.job_paths import run_root_of
    from orchestrator.posix.fd_limit import files_needed
    from orchestrator.system import SystemClock, run_command

    if resume and spec is None:
        raise click.UsageError("--resume needs SPEC, the job to resume")
    wish = _spec_of(spec, overrides)
    root = run_root_of(run_root, os.environ, wish.run_root if wish else "")
    if backend is None:
        backend = wish.cluster.backend if wish else "local"
    # Only ranks of a local job use the memory and the ports of this machine.
    here = plan_for(spec, overrides, looks="not").plan if spec and backend == "local" else None
    hosts = wish.cluster.hosts + wish.cluster.spare_hosts if wish else 1
    files = files_needed(hosts, hosts * wish.cluster.gpus_per_host if wish else 1)
    findings = examine(root, here, os.environ, run_command, SystemClock(), files)
    if spec is not None:
        settings = (*overrides, f"cluster.backend={backend}")
        findings += _input_findings(spec, settings, root, resume=resume)
    if backend == "slurm":
        findings += _slurm_findings(spec, (*overrides, "cluster.backend=slurm"), root)
    if backend == "kubernetes":
        findings += _kubernetes_findings(spec, (*overrides, "cluster.backend=kubernetes"), root)
    if as_json:
        print_json({"findings": encode(findings)})
    else:
        say(describe_findings(findings))
    sys.exit(1 if any(finding.verdict == "stops" for finding in findings) else 0)


@click.group(cls=WholeSentences, invoke_without_command=True, epilog="Example: ndctl hosts --all")
@root_option
@json_option
@click.option(
    "--all",
    "with_all",
    is_flag=True,
    help="Every host that a known job uses or an incident names, and strikes below 0.01.",
)
@click.pass_context
def hosts(ctx: click.Context, run_root: str | None, as_json: bool, with_all: bool) -> None:
    """Show the hosts that have strikes or a pin: whether jobs use them, and which job has them now.

    The subcommands show all about a host, clear its strikes, or pin it.
    """
    from orchestrator.cli.fleet import print_table
    from orchestrator.dashboard.fleet.host_table import host_json, host_lines
    from orchestrator.host_strikes import hosts_text
    from orchestrator.job_paths import run_root_of
    from orchestrator.system import SystemClock

    root = run_root_of(run_root, os.environ)
    if ctx.invoked_subcommand is not None:
        ctx.obj = root
        return
    uses = _host_uses(root, run_root, faded=with_all)
    shown = [one for one in uses if with_all or one.record is not None]
    if as_json:
        print_json({"hosts": [host_json(one) for one in shown]})
    elif not shown and with_all:
        say(f"no strikes in {root.absolute()}, and no known job uses a host")
    elif not shown:
        say(f"no strikes in {root.absolute()}; `ndctl hosts --all` shows the hosts of all jobs")
    else:
        print_table(lambda width: host_lines(shown, SystemClock().now(), width))
        records = [(one.cluster, one.record) for one in shown if one.record is not None]
        details = "\n".join(hosts_text({cluster: (record,)}, None) for cluster, record in records)
        if details and not with_all:
            say(f"\n{details}")


def _host_uses(root: "Path", run_root: str | None, *, faded: bool) -> "list[HostUse]":
    """Hosts with the strikes of one run root and the jobs of all that are known."""
    from orchestrator.app.fleet.known_jobs import Scope, known_jobs
    from orchestrator.app.fleet.summaries import Reader
    from orchestrator.dashboard.fleet.host_table import host_uses
    from orchestrator.host_strikes import records, still_counting
    from orchestrator.system import SystemClock

    clock = SystemClock()
    found = records(root, clock.now())
    if not faded:
        found = still_counting(found, clock.now())
    rows, _ = Reader(os.environ, clock).rows(
        known_jobs(Scope(run_root=run_root), os.environ, clock)
    )
    return host_uses(found, rows)


@hosts.command("show", epilog="Example: ndctl hosts show node7")
@click.argument("names", metavar="HOST...", nargs=-1, required=True)
@click.pass_obj
def show_hosts(root: "Path", names: tuple[str, ...]) -> None:
    """Show all about hosts: strikes with evidence, jobs that use them, incidents in all jobs."""
    from orchestrator.dashboard.fleet.host_table import host_text
    from orchestrator.errors import JobError

    found = [one for one in _host_uses(root, None, faded=True) if one.host in names]
    for name in names:
        if name not in {one.host for one in found}:
            raise JobError(
                f"no known job has a host {name}, and there is nothing recorded about it",
                fix="`ndctl hosts --all` lists all known hosts",
            )
    say("\n\n".join(host_text(one, None) for one in found))


@hosts.command("clear", epilog="Example: ndctl hosts clear node7")
@click.argument("host")
@click.option("--cluster", metavar="NAME", help="Only in this cluster. [all clusters]")
@click.pass_obj
def clear_host(root: "Path", host: str, cluster: str | None) -> None:
    """Clear the strikes of a host, so that jobs use it again."""
    from orchestrator.app import hosts
    from orchestrator.system import SystemClock

    say(hosts.clear_host(root, host, cluster, SystemClock()))


@hosts.command("pin", epilog='Example: ndctl hosts pin node7 --never --reason "burnt connector"')
@click.argument("host")
@click.option(
    "--never/--always", "never", default=None, required=True, help="Whether jobs use the host."
)
@click.option("--reason", required=True, metavar="TEXT", help="Why the host is pinned.")
@click.option("--cluster", metavar="NAME", help="Cluster of the host. [the only known cluster]")
@click.pass_obj
def pin_host(root: "Path", host: str, never: bool, reason: str, cluster: str | None) -> None:
    """Never or always use a host, regardless of its strikes, until it is unpinned."""
    from orchestrator.app import hosts
    from orchestrator.system import SystemClock

    use: Literal["never", "always"] = "never" if never else "always"
    clock = SystemClock()
    of = hosts.cluster_to_pin(root, host, cluster, clock)
    said = hosts.pin_host(root, host, of, use, reason, clock)
    say(said + hosts.unknown_node_warning(host, of, os.environ, clock))


@hosts.command("unpin", epilog="Example: ndctl hosts unpin node7")
@click.argument("host")
@click.option("--cluster", metavar="NAME", help="Only in this cluster. [all clusters]")
@click.pass_obj
def unpin_host(root: "Path", host: str, cluster: str | None) -> None:
    """Remove the pin of a host. Its strikes decide again."""
    from orchestrator.app import hosts
    from orchestrator.system import SystemClock

    say(hosts.unpin_host(root, host, cluster, SystemClock()))


@click.command(epilog="Example: ndctl calibrate --ranks 4 --write here.yaml")
@click.option("--write", "file", metavar="FILE", help="Write a hardware profile, a .yaml file.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Ranks on this host, as many as a job has. [its GPUs; 1 without a GPU]",
)
@click.option(
    "--budget",
    type=click.FloatRange(LEAST_S, MOST_S),
    default=CALIBRATE_S,
    show_default=True,
    metavar="SECONDS",
    help="Time for all measurements together.",
)
@json_option
def calibrate(file: str | None, ranks: int | None, budget: float, as_json: bool) -> None:
    """Measure products, attention, copies and collectives of the hosts at hand.

    On Slurm, `srun --ntasks-per-node=1 ndctl calibrate` measures all nodes of the allocation, and
    the links between them. `ndctl plan SPEC --inventory FILE` plans with the written profile.
    """
    from pathlib import Path

    from orchestrator.app.planning import calibrations
    from orchestrator.calibrate.show import calibrated_json, describe_measurements
    from orchestrator.system import SystemClock, run_command

    hosts = calibrations.hosts_at_hand(os.environ)
    found = calibrations.measure(
        hosts, calibrations.ranks_here(os.environ, ranks), budget, run_command
    )
    if found is None:
        return  # the first host has the numbers of all
    made = calibrations.calibrated(found, os.uname().nodename, SystemClock())
    if file is not None:
        calibrations.write(made, Path(file))
    if as_json:
        print_json(calibrated_json(found, made.profile, made.notes, file))
        return
    say(describe_measurements(found))
    for note in made.notes:
        say(f"note: {note}")
    if file is not None:
        say(f"wrote {file}; next: ndctl plan SPEC --inventory {file}")
