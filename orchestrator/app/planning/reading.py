"""Read a spec, and report schema errors together with what planning refuses."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import BackendError, NdctlError, SpecError

if TYPE_CHECKING:
    from orchestrator.load import Written
    from orchestrator.yaml_document import Document


def read_and_judge(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    judge: Callable[["Written"], object],
) -> "Written":
    """The spec in the file `path`.

    Args:
        judge: plans a spec. If the file has schema errors, it gets the spec without them.

    Raises:
        SpecError: with the schema errors, and with what `judge` refuses.
    """
    from orchestrator.load import read_document, written_in

    document = read_document(path, overrides, environ)
    try:
        return written_in(document, path, overrides)
    except SpecError as exc:
        raise _with_refusals(exc, document, path, overrides, judge) from exc.__cause__


def _with_refusals(
    wrong: SpecError,
    document: "Document",
    path: Path,
    overrides: Sequence[str],
    judge: Callable[["Written"], object],
) -> SpecError:
    from orchestrator.load import written_in
    from orchestrator.specs.repair import repaired
    from orchestrator.yaml_document import spec_error

    copy = repaired(document, [problem for _, problem in wrong.placed])
    if copy is None:
        return wrong
    try:
        judge(written_in(copy, path, overrides))
    except BackendError:  # It is reported when the spec is right.
        return wrong
    except NdctlError as exc:
        placed = exc.placed if isinstance(exc, SpecError) else ()
        also = exc.also if isinstance(exc, SpecError) else ()
        told = {problem.path for _, problem in wrong.placed}
        new = [(place, problem) for place, problem in placed if problem.path not in told]
        also = also if placed or also else (exc,)
        return spec_error(document.source, [*wrong.placed, *new], also)
    return wrong
