"""Options and arguments that several verbs share, and how answers are printed."""

import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import click

from orchestrator.contract.visible import visible

if TYPE_CHECKING:
    from orchestrator.app.planning.planned_hosts import Purpose
    from orchestrator.app.planning.plans import Planned
    from orchestrator.app.remote import Found, Place
    from orchestrator.contract.spec.job_spec import JobSpec


class FiniteRange(click.FloatRange):
    """Of numbers: neither `nan`, which no range keeps out, nor `inf`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from pathlib import Path

    root = Path(ctx.params.get("run_root") or os.environ.get("NDCTL_RUN_ROOT") or "ndctl-runs")
    return [p.parent.name for p in root.glob(f"{incomplete}*/journal.jsonl")]


spec_argument = click.argument("spec")
job_argument = click.argument("job", shell_complete=complete_job)
jobs_argument = click.argument(
    "jobs", metavar="JOB|PATTERN...", nargs=-1, required=True, shell_complete=complete_job
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the spec."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
inventory_option = click.option(
    "--inventory", metavar="FILE", help="The hosts to plan for. [the backend's]"
)
KEPT = "\n\t"
resume_option = click.option(
    "--resume", is_flag=True, help="Also what `submit --resume` would resume from."
)
BACKENDS = click.Choice(["local", "slurm", "kubernetes"])


def _as_setting(ctx: click.Context, param: click.Parameter, backend: str | None) -> tuple[str, ...]:
    return () if backend is None else (f"cluster.backend={backend}",)


backend_option = click.option(
    "--backend",
    "on_backend",
    type=BACKENDS,
    callback=_as_setting,
    help="Where it runs: short for --set cluster.backend=…  [the spec's]",
)


def _as_kind(ctx: click.Context, param: click.Parameter, kind: str | None) -> tuple[str, ...]:
    return () if kind is None else ("cluster.backend=kubernetes", f"cluster.kubernetes.kind={kind}")


kind_option = click.option(
    "--kind",
    "of_kind",
    type=click.Choice(["pytorchjob", "jobset", "trainjob"]),
    callback=_as_kind,
    help="Which resource of Kubernetes: short for --set cluster.kubernetes.kind=…  [the spec's]",
)
root_option = click.option(
    "--run-root", metavar="DIR", help="Where run directories are. [NDCTL_RUN_ROOT, else the spec's]"
)


def place_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Where a job is that this machine may not have seen yet: the verb gets a `Place` or None."""
    added = (
        click.option(
            "--backend",
            type=click.Choice(["kubernetes"]),
            help="Look in the cluster, not in the run root.",
        ),
        click.option("--context", metavar="NAME", help="Of the kubeconfig; implies --backend."),
        click.option("-n", "--namespace", metavar="NS", help="There; implies --backend."),
    )

    @functools.wraps(verb)
    def called(
        *args: Any, backend: str | None, context: str | None, namespace: str | None, **rest: Any
    ) -> Any:
        from orchestrator.app.remote import Place

        said = any((backend, context, namespace))
        place = Place(context=context, namespace=namespace) if said else None
        return verb(*args, place=place, **rest)

    for option in reversed(added):
        called = option(called)
    return called


def keys_with_values(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...]:
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values:
            raise click.BadParameter(f"must be KEY=VALUE,VALUE, got {text}")
    return texts


def find_all(
    names: tuple[str, ...], run_root: str | None, place: "Place | None", *, warns: bool = True
) -> "list[tuple[Found, bool]]":
    """The jobs that are named, in order, each once, and whether it was named by itself and not by a
    pattern, as `sweep-*`. Not `warns`: the caller says that one is shown as it was before.

    Raises JobError where there is no such job.
    """
    from orchestrator.app import remote
    from orchestrator.job_paths import is_pattern, run_root_of
    from orchestrator.system import SystemClock

    found: dict[str, tuple[Found, bool]] = {}
    for name in names:
        if not is_pattern(name):
            one = find(name, run_root, place, warns=warns)
            found[str(one.run_dir.path)] = (one, True)
            continue
        root = run_root_of(run_root, os.environ)
        matching = remote.matching(root, name, place, os.environ, SystemClock())
        remote.refresh_all(matching)
        for why in dict.fromkeys(one.stale.message for one in matching if one.stale and warns):
            warn(why)
        for one in matching:
            found.setdefault(str(one.run_dir.path), (one, False))
    return list(found.values())


def find(name: str, run_root: str | None, place: "Place | None", *, warns: bool = True) -> "Found":
    """A job, as it is now. Not `warns`: the caller says that it is shown as it was before."""
    from orchestrator.app import remote
    from orchestrator.job_paths import run_root_of
    from orchestrator.journal.journal import lost_end
    from orchestrator.system import SystemClock

    found = remote.find(run_root_of(run_root, os.environ), name, place, os.environ, SystemClock())
    remote.refresh(found)
    if found.stale is not None and warns:
        warn(f"{found.stale.message}; shown is what was known before")
    if lost := lost_end(found.run_dir.journal):
        warn(lost)
    return found


def say(text: str, *, label: str = "", err: bool = False, **style: Any) -> None:
    """The one way in which a verb prints. Names, messages and logs in `text` are of others, so it
    passes `visible`; only `label`, in its `style`, has colours, and those on a terminal alone."""
    prefix = click.style(visible(label), **style) if label else ""
    click.echo(f"{prefix}{visible(text, keep=KEPT)}", err=err)


def warn(text: str) -> None:
    say(f"warning: {text}", err=True)


def print_json(body: Any, indent: int | None = 2) -> None:
    import json

    # JSON leaves DEL as it is, and is ASCII else: `visible` would write it as no JSON has it.
    say(json.dumps(body, indent=indent).replace("\x7f", "\\u007f"))


def print_as(
    as_json: bool, value: Any, body: Callable[[Any], Any], text: Callable[[Any], str]
) -> None:
    if as_json:
        print_json(body(value))
    else:
        say(text(value))


Looks = Literal["not", "at-inputs", "at-checkpoint-too"]


def plan_for(
    spec: str,
    overrides: tuple[str, ...],
    inventory: str | None = None,
    *,
    looks: Looks = "at-inputs",
    purpose: "Purpose" = "look",
    run_root: str | None = None,
) -> "Planned":
    """Where a job is to run, what it reads has to be there, and what it resumes from as well."""
    from pathlib import Path

    from orchestrator.app.planning import plans

    plan = {
        "not": plans.plan_spec,
        "at-inputs": plans.plan_and_look,
        "at-checkpoint-too": plans.plan_and_look_back,
    }[looks]
    hosts = None if inventory is None else Path(inventory)
    root = None if run_root is None else Path(run_root)
    planned = plan(Path(spec), overrides, os.environ, hosts, root, purpose)
    warn_of_secrets(planned.spec)
    return planned


def looks_for(*, resume: bool) -> Looks:
    return "at-checkpoint-too" if resume else "at-inputs"


def warn_of_secrets(spec: "JobSpec") -> None:
    """Of those that a spec holds in plain text."""
    from orchestrator.contract.spec.kubernetes_spec import plain_secrets
    from orchestrator.contract.spec.slurm_spec import plain_secrets as plain_on_slurm

    for key in plain_on_slurm(spec.cluster.slurm) if spec.cluster.backend == "slurm" else ():
        name = key.rpartition(".")[2]
        warn(
            f"cluster.slurm.{key} looks like a secret, and is plain text in the spec, in the run"
            " directory and in the batch script, which Slurm keeps as well\n"
            "  fix: write it into a file that you alone may read, and"
            f" `- export {name}=$(cat FILE)` into cluster.slurm.setup"
        )
    kubernetes, job = spec.cluster.kubernetes, spec.name
    for key in plain_secrets(kubernetes) if spec.cluster.backend == "kubernetes" else ():
        name = key.rpartition(".")[2]
        of = f"-n {kubernetes.namespace} " if kubernetes.namespace else ""
        warn(
            f"cluster.kubernetes.{key} looks like a secret, and is plain text in the spec, in the"
            f" run directory and in ConfigMap {job}-launch\n"
            f"  fix: `kubectl {of}create secret generic {job}-env --from-literal={name}=…`, and"
            f" cluster.kubernetes.env: {{{name}: {{secret: {job}-env, key: {name}}}}}"
        )
