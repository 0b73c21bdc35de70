"""Options and arguments that several commands share, and functions that print."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from orchestrator.contract.visible import VisibleStream, visible

if TYPE_CHECKING:
    from orchestrator.app.planning.planned_hosts import Purpose
    from orchestrator.app.planning.plans import Planned
    from orchestrator.app.remote import Found, Place
    from orchestrator.contract.plan import Plan
    from orchestrator.contract.spec.job_spec import CommonSpec


class FiniteRange(click.FloatRange):
    """Also refuses `nan`, which compares false with every bound, and `inf`."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Amount(click.ParamType[float]):
    """A large count such as `15T`, `300B` or `1.5e12`."""

    name = "amount"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        from orchestrator.plan.figures import read_amount

        try:
            return read_amount(str(value))
        except ValueError:
            self.fail(
                f"{value} is not a count of at least 1 and below 1e21, such as 15T or 1.5e12.",
                param,
                ctx,
            )


class SoftwareName(click.ParamType[str]):
    """A training software whose speed can be planned."""

    name = "software"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from orchestrator.inventory.software import software_names, unknown_software

        if value not in software_names():
            problem = unknown_software(value)
            self.fail(f"{value} is not {problem.limit}; {problem.fix}", param, ctx)
        return str(value)


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:

    from orchestrator.errors import NdctlError
    from orchestrator.job_paths import run_root_of

    try:
        root = run_root_of(ctx.params.get("run_root"), os.environ)
    except NdctlError:  # a mistake in the user's settings, which every other command reports
        return []
    names = [p.parent.name for p in root.glob(f"{incomplete}*/journal.jsonl")]
    if ctx.params.get("run_root"):
        return names
    from orchestrator.registry.store import own_entries

    registered = (one.entry.name for one in own_entries(os.environ))
    return sorted({*names, *(name for name in registered if name.startswith(incomplete))})


spec_argument = click.argument("spec")


def spec_files(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument SPEC and the option `-f`. The command gets the first file as `spec`, and
    the others at the front of its `overrides`."""
    argument = click.argument("spec", required=False)
    option = click.option(
        "-f",
        "--file",
        "files",
        multiple=True,
        metavar="FILE",
        help="Lay FILE over SPEC, or over the first -f: its keys win, null removes a key.",
    )

    @functools.wraps(verb)
    def called(
        *args: Any,
        spec: str | None,
        files: tuple[str, ...],
        overrides: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        from orchestrator.contract.spec.types import OVERLAY

        given = (*([] if spec is None else [spec]), *files)
        if not given:
            raise click.UsageError("Missing argument 'SPEC': the file of the job spec.")
        over = (f"{OVERLAY}{file}" for file in given[1:])
        return verb(*args, spec=given[0], overrides=(*over, *overrides), **rest)

    return argument(option(called))


job_argument = click.argument("job", shell_complete=complete_job)
jobs_argument = click.argument(
    "jobs", metavar="JOB|PATTERN...", nargs=-1, required=True, shell_complete=complete_job
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the spec, such as parallel.tp=2.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
inventory_option = click.option(
    "--inventory", metavar="FILE", help="Plan for the hosts in FILE. [hosts of the backend]"
)
KEPT = "\n\t"
resume_option = click.option(
    "--resume", is_flag=True, help="Also check the checkpoint that `submit --resume` would use."
)
BACKENDS = click.Choice(["local", "slurm", "kubernetes"])


def _as_setting(ctx: click.Context, param: click.Parameter, backend: str | None) -> tuple[str, ...]:
    return () if backend is None else (f"cluster.backend={backend}",)


backend_option = click.option(
    "--backend",
    "on_backend",
    type=BACKENDS,
    callback=_as_setting,
    help="Backend to run on; short for --set cluster.backend=…  [from the spec]",
)


def _as_kind(ctx: click.Context, param: click.Parameter, kind: str | None) -> tuple[str, ...]:
    return () if kind is None else ("cluster.backend=kubernetes", f"cluster.kubernetes.kind={kind}")


kind_option = click.option(
    "--kind",
    "of_kind",
    type=click.Choice(["pytorchjob", "jobset", "trainjob"]),
    callback=_as_kind,
    help="Kubernetes resource; short for --set cluster.kubernetes.kind=…  [from the spec]",
)
root_option = click.option(
    "--run-root",
    metavar="DIR",
    help="Folder of the run directories. [NDCTL_RUN_ROOT, or from the spec]",
)


def place_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that locate a job in a cluster. The command gets a `Place` or None."""
    added = (
        click.option(
            "--backend",
            type=click.Choice(["kubernetes"]),
            help="Find the job in the cluster, not in the run root.",
        ),
        click.option(
            "--context", metavar="NAME", help="Context of the kubeconfig; implies --backend."
        ),
        click.option(
            "-n", "--namespace", metavar="NS", help="Namespace of the job; implies --backend."
        ),
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


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def time_span(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Seconds of `90s`, `10m`, `12h`, `30d` or `8w`."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS or not (number.isascii() and number.isdigit()):
        raise click.BadParameter(f"{text} is not a time span such as 90s, 10m, 12h, 30d or 8w")
    return float(number) * UNITS[unit]


since_option = click.option(
    "--since",
    "since_s",
    callback=time_span,
    metavar="SPAN",
    help="Only the last 90s, 10m, 12h, 30d.",
)


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
    """The named jobs in order without duplicates, each with whether it was named by its full name
    and not by a pattern such as `sweep-*` or by the name of its group.

    Args:
        warns: print a warning for a job that cannot be refreshed.

    Raises:
        JobError: a name or pattern matches no job.
    """
    from orchestrator.app import remote
    from orchestrator.errors import JobError
    from orchestrator.job_paths import is_pattern

    found: dict[str, tuple[Found, bool]] = {}
    for name in names:
        matching = _matching(name, run_root, place) if is_pattern(name) else []
        if not matching:
            try:
                one = find(name, run_root, place, warns=warns)
            except JobError:
                matching = _group(name, run_root, place)
                if not matching:
                    raise
            else:
                found[str(one.run_dir.path)] = (one, True)
                continue
        remote.refresh_all(matching)
        for why in dict.fromkeys(one.stale.message for one in matching if one.stale and warns):
            warn(why)
        for one in matching:
            found.setdefault(str(one.run_dir.path), (one, False))
    return list(found.values())


def _matching(pattern: str, run_root: str | None, place: "Place | None") -> "list[Found]":
    """Jobs in the run root, else the user's registered ones: a pattern never means jobs of others,
    because it may be given to `cancel`."""
    from orchestrator.app import remote
    from orchestrator.errors import JobError
    from orchestrator.job_paths import run_root_of
    from orchestrator.system import SystemClock

    root, clock = run_root_of(run_root, os.environ), SystemClock()
    try:
        return remote.matching(root, pattern, place, os.environ, clock)
    except JobError:
        if run_root is not None or place is not None:
            raise
        from orchestrator.app.fleet.known_jobs import own_matching

        return own_matching(pattern, os.environ, clock)


def _group(name: str, run_root: str | None, place: "Place | None") -> "list[Found]":
    """The user's own jobs of the group `name`; empty: there is no such group."""
    from orchestrator.app.fleet.known_jobs import own_group
    from orchestrator.system import SystemClock

    return own_group(name, run_root, place, os.environ, SystemClock())


def find(name: str, run_root: str | None, place: "Place | None", *, warns: bool = True) -> "Found":
    """The job `name`, refreshed. `warns`: print a warning if it cannot be refreshed."""
    from orchestrator.app import remote
    from orchestrator.journal.journal import damaged_end

    found = _find(name, run_root, place)
    remote.refresh(found)
    if found.stale is not None and warns:
        warn(f"{found.stale.message}; showing the last known state")
    if lost := damaged_end(found.run_dir.journal):
        warn(lost)
    return found


def _find(name: str, run_root: str | None, place: "Place | None") -> "Found":
    """The job in the run root, else the registered one of that name."""
    from orchestrator.app import remote
    from orchestrator.errors import JobError
    from orchestrator.job_paths import run_root_of
    from orchestrator.system import SystemClock

    clock = SystemClock()
    try:
        return remote.find(run_root_of(run_root, os.environ), name, place, os.environ, clock)
    except JobError as exc:
        if run_root is not None or place is not None:
            raise
        from orchestrator.app.fleet.known_jobs import gone_words, locate
        from orchestrator.app.fleet.summaries import with_number

        if (found := locate(name, os.environ, clock)) is not None:
            return found
        if name.isdecimal() and (named := with_number(name, os.environ, clock)) is not None:
            message = f"no job is named {name}; it is the scheduler's number of {named}"
            raise JobError(message, fix=f"give the name, {named}") from exc
        if words := gone_words(name, os.environ, clock):
            raise JobError(f"{exc.message}; registered: {words}", fix=exc.fix) from exc
        raise


def say(text: str, *, label: str = "", err: bool = False, **style: Any) -> None:
    """Print `text`. All commands print with this function.

    Names, messages and logs in `text` come from other programs, so `visible` escapes control
    characters. Only `label` has colours, and only on a terminal.
    """
    prefix = click.style(visible(label), **style) if label else ""
    click.echo(f"{prefix}{visible(text, keep=KEPT)}", err=err, color=colour())


def say_report(text: str) -> None:
    """Print a report: on a terminal in colours, and wrapped."""
    import sys

    if not sys.stdout.isatty():
        say(text)
        return
    import shutil

    from orchestrator.dashboard.terminal.report import report_lines

    for line in report_lines(text, shutil.get_terminal_size().columns):
        say_line((piece.text, piece.look) for piece in line)


def say_error(text: str) -> None:
    """Print an error, its first word in red on a terminal."""
    import sys

    # `main` replaces sys.stderr by a stream that also drops colours. This text is visible already.
    stream = sys.stderr
    below = stream.unwrapped if isinstance(stream, VisibleStream) else stream
    word = click.style("error:", fg="red", bold=True)
    click.echo(f"{word} {visible(text, keep=KEPT)}", file=below, color=colour())


def say_line(pieces: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Print one line of pieces, each with its look. Text is made visible as by `say`."""
    line = "".join(click.style(visible(text), **look) for text, look in pieces)
    click.echo(line, color=colour())


def colour() -> bool | None:
    """False if the user wants no colours (https://no-color.org). None: only on a terminal."""
    return False if os.environ.get("NO_COLOR") else None


def warn(text: str) -> None:
    say(f"warning: {text}", err=True)


SCHEMA_VERSION = 1
"""Version of everything that `--json` prints. docs/reference.md says what changes it."""


def print_json(body: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Print the answer of `--json`. A list is the value of a key, so that it has a version too."""
    say(json_text({"schema_version": SCHEMA_VERSION, **body}, indent))


def json_text(body: Any, indent: int | None = 2) -> str:
    import json

    # json.dumps does not escape DEL. `visible` would, but in a form that is not valid JSON.
    return json.dumps(body, indent=indent).replace("\x7f", "\\u007f")


def print_as(
    as_json: bool,
    value: Any,
    body: Callable[[Any], Mapping[str, Any]],
    text: Callable[[Any], str],
    printed: Callable[[str], None] = say,
) -> None:
    """
    Args:
        printed: `say_report` for sentences; tables are not wrapped.
    """
    if as_json:
        print_json(body(value))
    else:
        printed(text(value))


OFFLINE = (
    "plan without the cluster: --set cluster.gpu=h100-sxm-80gb, or the hosts of a file with"
    " --inventory FILE"
)
"""Fix of a command that plans, if the cluster cannot be asked."""
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
    """Plan a job. `looks` says whether its inputs and its checkpoint are checked as well."""
    from pathlib import Path

    from orchestrator.app.planning import plans
    from orchestrator.errors import BackendError

    plan = {
        "not": plans.plan_spec,
        "at-inputs": plans.plan_and_look,
        "at-checkpoint-too": plans.plan_and_look_back,
    }[looks]
    hosts = None if inventory is None else Path(inventory)
    root = None if run_root is None else Path(run_root)
    try:
        planned = plan(Path(spec), overrides, os.environ, hosts, root, purpose)
    except BackendError as exc:
        # Of a job that is submitted, the cluster is asked whatever its plan is made from.
        if inventory is None and "--inventory" not in exc.fix and purpose != "submit":
            exc.fix = f"{exc.fix}; or {OFFLINE}" if exc.fix else OFFLINE
        raise
    warn_of_settings(planned.spec, planned.plan)
    return planned


def looks_for(*, resume: bool) -> Looks:
    return "at-checkpoint-too" if resume else "at-inputs"


def warn_of_settings(spec: "CommonSpec", plan: "Plan | None" = None) -> None:
    """Warn of secrets in plain text, and of settings that few users want."""
    from orchestrator.app.submission.spec_warnings import spec_warnings

    for text in spec_warnings(spec, plan):
        warn(text)
