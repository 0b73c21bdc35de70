"""`ndctl plan --compare`: a plan for each combination of values of some keys."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.app.planning.decisions import Wish, decision_of
from orchestrator.app.planning.plans import plan_spec
from orchestrator.app.submission.combinations import combinations
from orchestrator.errors import PlanError, SpecError
from orchestrator.plan.show.compare import Compared
from orchestrator.yaml_document import spec_error


def compare_plans(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None,
    compare: Sequence[str],
    wish: Wish,
) -> list[Compared]:
    """`compare`: items like `KEY=VALUE,VALUE`. A value that a spec cannot have is refused like one
    without a plan.

    Raises:
        SpecError: no combination of values makes a valid spec; has the problems of all.
        BackendError: the cluster is unreachable.
    """
    found: list[Compared] = []
    invalid: list[SpecError] = []
    for values in combinations(compare):
        try:
            changed = (*overrides, *(f"--compare {value}" for value in values))
            planned = plan_spec(path, changed, environ, inventory, purpose=wish.purpose)
        except PlanError as exc:
            found.append(Compared(values=values, plan=None, refusal=exc.message))
        except SpecError as exc:
            invalid.append(exc)
            found.append(Compared(values=values, plan=None, refusal=exc.message))
        else:
            decision = decision_of(planned, environ, inventory, wish)
            found.append(Compared(values=values, plan=planned.plan, decision=decision))
    if len(invalid) == len(found):
        raise _all_in_one(invalid, path)
    return found


def _all_in_one(errors: Sequence[SpecError], path: Path) -> SpecError:
    """Several combinations have the same problems, which are told once."""
    if any(not error.placed and not error.also for error in errors):
        return errors[0]  # the file itself cannot be read
    placed = {
        f"{place}: {problem}": (place, problem) for one in errors for place, problem in one.placed
    }
    also = {str(other): other for one in errors for other in one.also}
    return spec_error(str(path), [*placed.values()], [*also.values()])
