"""`ndctl submit SPEC --sweep KEY=A,B`: one job for each combination of values.

Each job has its own request to the scheduler, because the jobs may differ in their number of hosts,
which the tasks of a Slurm job array cannot. All jobs are planned and checked before the first is
submitted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.planning.plans import plan_and_look
from orchestrator.app.submission import submit_job
from orchestrator.app.submission.combinations import combinations
from orchestrator.app.submission.submit_job import Submission, Submitted
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.job_spec import KUBERNETES_NAME, NAME
from orchestrator.errors import JobError, NdctlError
from orchestrator.job_paths import run_root_of
from orchestrator.load import read_spec
from orchestrator.seams import Clock

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
        raise JobError(
            f"the sweep has {len(found):,} combinations; at most {MOST:,} are allowed",
            fix="use fewer values, or split the sweep",
        )
    elements: list[Element] = []
    refused: list[tuple[str, NdctlError]] = []
    for values, name in zip(found, _names(sweep, found, environ), strict=True):
        try:
            submission = _planned(sweep, values, name, environ)
            said = submit_job.check(submission, environ, clock)
        except NdctlError as exc:
            refused.append((" ".join(values), exc))
        else:
            elements.append(Element(values=values, submission=submission, said=said))
    if refused:
        raise _refusal(refused, len(found))
    return elements


def _planned(
    sweep: Sweep, values: Sequence[str], name: str, environ: Mapping[str, str]
) -> Submission:
    # The name goes last, because it includes a name that may be among the values.
    overrides = (*sweep.overrides, *values, f"name='{name}'")
    planned = plan_and_look(sweep.spec, overrides, environ, sweep.inventory, purpose="submit")
    if sweep.at_once is not None and planned.spec.cluster.backend != "slurm":
        raise JobError(
            f"--at-once needs --backend slurm; backend {planned.spec.cluster.backend} has no job"
            " dependencies",
            fix="remove --at-once",
        )
    return Submission(
        planned=planned,
        run_root=run_root_of(sweep.run_root, environ, planned.spec.run_root),
        resume=sweep.resume,
        new=sweep.new,
    )


def _names(sweep: Sweep, found: Sequence[tuple[str, ...]], environ: Mapping[str, str]) -> list[str]:
    for values in found:
        try:
            spec = read_spec(sweep.spec, (*sweep.overrides, *values), environ)
        except NdctlError:
            continue
        return names_of(spec.name, found, kubernetes=spec.cluster.backend == "kubernetes")
    return names_of("sweep", found, kubernetes=False)  # all are refused; any name will do


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


def pattern_of(names: Sequence[str]) -> str:
    """A shell pattern that matches all names, made from their common prefix."""
    first, last = min(names), max(names)
    common = next((at for at, char in enumerate(first) if last[at : at + 1] != char), len(first))
    return f"{first[:common]}*" if len(names) > 1 else first


def _refusal(refused: Sequence[tuple[str, NdctlError]], total: int) -> NdctlError:
    """One error for all combinations. Equal messages are printed once."""
    alike: dict[str, list[str]] = {}
    for values, exc in refused:
        alike.setdefault(str(exc), []).append(values)
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
        submission = element.submission if after is None else _after(element.submission, after)
        try:
            submitted = submit_job.submit(submission, environ, clock)
        except NdctlError as exc:
            raise _cut_short(elements, number, exc) from exc
        ids.append(_slurm_id(submission) if sweep.at_once else None)
        yield element, submitted


def _after(submission: Submission, job_id: str) -> Submission:
    """The submission with a dependency on the end of a Slurm job. A requeue is not an end."""
    planned = submission.planned
    slurm = planned.spec.cluster.slurm
    own = [flag for flag in slurm.sbatch_args if flag.startswith("--dependency=")]
    rest = [flag for flag in slurm.sbatch_args if flag not in own]
    waits = ",".join([*(flag.partition("=")[2] for flag in own), f"afterany:{job_id}"])
    slurm = replace(slurm, sbatch_args=(*rest, f"--dependency={waits}"))
    spec = replace(planned.spec, cluster=replace(planned.spec.cluster, slurm=slurm))
    return replace(submission, planned=replace(planned, spec=spec))


def _slurm_id(submission: Submission) -> str | None:
    from orchestrator.backends.slurm.job_lookup import recorded
    from orchestrator.journal.current_launch import current_launch

    launched = current_launch(submission.run_dir)
    return None if launched is None else recorded(launched.launch)


def _cut_short(elements: Sequence[Element], number: int, exc: NdctlError) -> NdctlError:
    done = ", ".join(one.name for one in elements[:number]) or "none"
    left = ", ".join(one.name for one in elements[number + 1 :]) or "none"
    names = " ".join(one.name for one in elements[:number])
    fix = exc.fix
    if names:
        fix = f"{fix + '; ' if fix else ''}`ndctl cancel {names}` cancels the submitted jobs"
    return type(exc)(
        f"{elements[number].name}: {exc.message}\nalready submitted: {done}; not submitted: {left}",
        fix=fix,
    )
