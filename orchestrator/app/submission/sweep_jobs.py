"""`ndctl submit SPEC --sweep KEY=A,B`: one job for each combination of values.

Each job has its own request to the scheduler, because the jobs may differ in their number of hosts,
which the tasks of a Slurm job array cannot. All jobs are planned and checked before the first is
submitted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import join, quote

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.planning.plans import plan_and_look
from orchestrator.app.remote import Found
from orchestrator.app.submission import submit_job
from orchestrator.app.submission.after_jobs import with_after, with_dependency
from orchestrator.app.submission.combinations import combinations
from orchestrator.app.submission.payload import Submission
from orchestrator.app.submission.submit_job import Submitted
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.job_spec import KUBERNETES_NAME, NAME
from orchestrator.contract.spec.types import OVERLAY
from orchestrator.errors import NdctlError, SpecError
from orchestrator.job_paths import run_root_of
from orchestrator.load import read_spec
from orchestrator.seams import Clock

SHOWN = 5
"""Commands that an error shows."""
MOST = 1000
"""Maximum number of combinations. More are probably a mistake."""


class Sweep(Struct, frozen=True, kw_only=True):
    spec: Path
    overrides: tuple[str, ...]
    keys: tuple[str, ...]
    """Items like `KEY=VALUE,VALUE`."""
    inventory: Path | None = None
    run_root: str | None = None
    resume: bool = False
    new: bool = False
    group: str = ""
    """Name of the group; empty: that of the spec."""
    after: tuple[Found, ...] = ()
    """Jobs that must succeed before any of these starts."""
    at_once: int | None = None
    """Maximum number of jobs that run at the same time (Slurm)."""


class Element(Struct, frozen=True, kw_only=True):
    values: tuple[str, ...]
    """Items like `KEY=VALUE`."""
    submission: Submission
    said: tuple[Finding, ...]
    """Results of the scheduler's checks."""

    @property
    def name(self) -> str:
        return self.submission.planned.spec.name


def elements_of(sweep: Sweep, environ: Mapping[str, str], clock: Clock) -> list[Element]:
    """All jobs of the sweep, planned and checked.

    Raises:
        NdctlError: has the errors of all combinations.
    """
    found = combinations(sweep.keys)
    if len(found) > MOST:
        raise SpecError(
            f"the sweep has {len(found):,} combinations; at most {MOST:,} are allowed",
            fix="use fewer values, or split the sweep",
        )
    if twice := [" ".join(values) for values, times in Counter(found).items() if times > 1]:
        raise SpecError(
            f"the sweep has {twice[0]} more than once", fix="give each value of a key once"
        )
    group, names = _named(sweep, found, environ)
    elements: list[Element] = []
    refused: list[tuple[str, NdctlError]] = []
    for values, name in zip(found, names, strict=True):
        try:
            submission = replace(_planned(sweep, values, name, environ), group=group)
            said = submit_job.check(submission, environ, clock)
        except NdctlError as exc:
            refused.append((" ".join(values), exc))
        else:
            elements.append(Element(values=values, submission=submission, said=said))
    if refused:
        raise _refusal(refused, len(found))
    return elements


def _overrides(sweep: Sweep, values: Sequence[str]) -> tuple[str, ...]:
    return (*sweep.overrides, *(f"--sweep {value}" for value in values))


def _planned(
    sweep: Sweep, values: Sequence[str], name: str, environ: Mapping[str, str]
) -> Submission:
    # The name goes last, because it includes a name that may be among the values.
    overrides = (*_overrides(sweep, values), f"name='{name}'")
    planned = plan_and_look(sweep.spec, overrides, environ, sweep.inventory, purpose="submit")
    if sweep.at_once is not None and planned.spec.cluster.backend != "slurm":
        raise SpecError(
            f"--at-once needs --backend slurm; backend {planned.spec.cluster.backend} has no job"
            " dependencies",
            fix="remove --at-once",
        )
    submission = Submission(
        planned=planned,
        run_root=run_root_of(sweep.run_root, environ, planned.spec.run_root),
        resume=sweep.resume,
        new=sweep.new,
    )
    return with_after(submission, sweep.after) if sweep.after else submission


def _named(
    sweep: Sweep, found: Sequence[tuple[str, ...]], environ: Mapping[str, str]
) -> tuple[str, list[str]]:
    """The name of the group, and a name for each combination."""
    for values in found:
        try:
            spec = read_spec(sweep.spec, _overrides(sweep, values), environ)
        except NdctlError:
            continue
        root = run_root_of(sweep.run_root, environ, spec.run_root)
        kubernetes = spec.cluster.backend == "kubernetes"
        group = sweep.group or spec.name
        # A job of that name would hide the group.
        group = f"{group}-sweep" if (root / group).exists() else group
        return group, names_of(spec.name, found, kubernetes=kubernetes)
    return "sweep", names_of("sweep", found, kubernetes=False)  # all are refused; any name will do


def names_of(base: str, found: Sequence[tuple[str, ...]], *, kubernetes: bool) -> list[str]:
    """A name with the values for each combination, such as `base-lr-1e-4`. If one of them is not a
    valid job name, or two are equal, numbers are used instead."""
    names = [_name(base, values, kubernetes=kubernetes) for values in found]
    limit = KUBERNETES_NAME if kubernetes else NAME
    if all(map(limit.admits, names)) and len({name.casefold() for name in names}) == len(names):
        return names
    width = len(str(len(found)))
    return [f"{base}-{number:0{width}d}" for number in range(1, len(found) + 1)]


def _name(base: str, values: Sequence[str], *, kubernetes: bool) -> str:
    words = [base]
    for key, _, value in (one.partition("=") for one in values):
        if key == "name":
            words[0] = value
        else:
            words += [key.rpartition(".")[2], value]
    taken = r"[^a-z0-9]+" if kubernetes else r"[^A-Za-z0-9._]+"
    text = "-".join(words)
    text = re.sub(taken, "-", text.lower() if kubernetes else text)
    return re.sub(r"\.\.+", ".", text).strip("-.")


def _refusal(refused: Sequence[tuple[str, NdctlError]], total: int) -> NdctlError:
    """One error for all combinations. Equal problems are printed once."""
    from orchestrator.yaml_document import texts_of

    alike: dict[str, list[str]] = {}
    for values, exc in refused:
        for text in texts_of(exc):
            alike.setdefault(text, []).append(values)
    told = [
        f"{'all combinations' if len(ones) == total else ', '.join(ones)}: {said}"
        for said, ones in alike.items()
    ]
    lines = "\n".join(told).replace("\n", "\n  ")
    message = (
        f"{len(refused)} of {total} combinations have errors; nothing was submitted:\n  {lines}"
    )
    return type(refused[0][1])(message)


def submit_all(
    sweep: Sweep, elements: Sequence[Element], environ: Mapping[str, str], clock: Clock
) -> Iterator[tuple[Element, Submitted]]:
    """Submit the jobs one after the other, and yield each when it is submitted.

    Raises:
        NdctlError: a submission failed; has the names of the jobs submitted before.
    """
    ids: list[str | None] = []
    for number, element in enumerate(elements):
        after = ids[number - sweep.at_once] if sweep.at_once and number >= sweep.at_once else None
        submission = element.submission
        if after is not None:  # a requeue is not an end
            submission = with_dependency(submission, f"afterany:{after}")
        try:
            submitted = submit_job.submit(submission, environ, clock)
        except NdctlError as exc:
            raise _cut_short(sweep, elements, number, exc) from exc
        ids.append(_slurm_id(submission) if sweep.at_once else None)
        yield element, submitted


def _slurm_id(submission: Submission) -> str | None:
    from orchestrator.backends.slurm.job_lookup import recorded
    from orchestrator.journal.current_launch import current_launch

    launched = current_launch(submission.run_dir)
    return None if launched is None else recorded(launched.launch)


def _cut_short(
    sweep: Sweep, elements: Sequence[Element], number: int, exc: NdctlError
) -> NdctlError:
    """Says which jobs run, and how to go on or back."""
    element, group = elements[number], elements[number].submission.group
    done = ", ".join(one.name for one in elements[:number]) or "none"
    left = ", ".join(one.name for one in elements[number + 1 :]) or "none"
    rest = [_command(sweep, one) for one in elements[number:]]
    more = f"\n    and {len(rest) - SHOWN:,} more" if len(rest) > SHOWN else ""
    steps = [exc.fix, "to go on, submit the others:"]
    fix = "\n    ".join([*filter(None, steps), *rest[:SHOWN]]) + more
    if number:
        fix += f"\n  `ndctl cancel {quote(group)}` cancels the submitted jobs"
    return type(exc)(
        f"{element.name}: {exc.message}\nalready submitted: {done}; not submitted: {left}", fix=fix
    )


def _command(sweep: Sweep, element: Element) -> str:
    """The command that submits one job of the sweep."""
    words = ["ndctl", "submit", str(sweep.spec)]
    for override in (*sweep.overrides, *element.values, f"name='{element.name}'"):
        words += override.split(" ", 1) if override.startswith(OVERLAY) else ["--set", override]
    words += ["--group", element.submission.group]
    words += ["--run-root", sweep.run_root] if sweep.run_root else []
    return join(words)
