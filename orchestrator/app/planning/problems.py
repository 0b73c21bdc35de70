"""What is wrong with a spec, as `ndctl validate --json` prints it for editors."""

import re
from collections.abc import Iterator
from typing import Any

from orchestrator.app.planning.plans import Planned
from orchestrator.app.submission.spec_warnings import spec_warnings
from orchestrator.contract.codec import ABSENT, Problem, encode
from orchestrator.contract.spec.job_spec import CommonSpec
from orchestrator.errors import BackendError, NdctlError, SpecError
from orchestrator.yaml_document import Place


def refused_json(exc: NdctlError, file: str) -> dict[str, Any]:
    """The answer for a spec that is refused. `valid` is null if a cluster could not be asked."""
    valid = None if isinstance(exc, BackendError) else False
    return {"valid": valid, "problems": [*_problems(exc, file)], "message": str(exc)}


def _problems(exc: NdctlError, file: str) -> Iterator[dict[str, Any]]:
    placed = exc.placed if isinstance(exc, SpecError) else ()
    for place, problem in placed:
        yield _placed(place, problem, file)
    without = exc.also if isinstance(exc, SpecError) else ()
    for one in (*without, *(() if placed or without else (exc,))):
        yield _problem(file, message=one.message, fix=one.fix)


def _placed(place: str, problem: Problem, file: str) -> dict[str, Any]:
    said = f"{problem.path or 'the spec'}: {problem.said}"
    body = _problem(file, message=said, fix=problem.fix, place=place)
    body |= {"key": problem.path, "limit": problem.limit}
    return body | {"value": None if problem.value is ABSENT else encode(problem.value)}


def _problem(
    file: str, *, message: str, fix: str, place: str = "", severity: str = "error"
) -> dict[str, Any]:
    """`file` is where an editor shows a problem that has no place of its own."""
    at = place if isinstance(place, Place) else None
    return {
        "severity": severity,
        "file": at.file if at else file,
        "line": at.line if at else None,
        "column": at.column if at else None,
        "place": place or file,
        "key": None,
        "value": None,
        "limit": None,
        "fix": fix or None,
        "message": message,
    }


def doubts_json(planned: Planned, file: str) -> list[dict[str, Any]]:
    """Warnings about a valid spec."""
    warnings = spec_warnings(planned.spec, planned.plan)
    doubts = planned.looked.doubts if planned.looked is not None else ()
    return [_warning(text, planned, file) for text in (*warnings, *doubts)]


def needed_to_submit(spec: CommonSpec) -> Iterator[str]:
    """What pods need and a plan does not."""
    if spec.cluster.backend == "kubernetes":
        from orchestrator.backends.kubernetes.render.checks import missing

        for one in missing(spec.cluster.kubernetes):
            yield f"to submit it, {one.path} {one.said}; {one.fix}"


def _warning(text: str, planned: Planned, file: str) -> dict[str, Any]:
    # A warning about a key begins with it: `data.prompt_column=q: …`.
    key = re.split(r"[=:\s]", text, maxsplit=1)[0]
    message, _, fix = text.partition("\n  fix: ")
    places = planned.written.document.places if planned.written is not None else {}
    place = places.get(key, "")
    body = _problem(file, message=message, fix=fix, place=place, severity="warning")
    return body | {"key": key if key in places else None}
