"""`ndctl plan --compare`: a plan for each combination of values of some keys."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.app.planning.decisions import Wish, decision_of
from orchestrator.app.planning.plans import plan_spec
from orchestrator.app.submission.combinations import combinations
from orchestrator.errors import PlanError, SpecError
from orchestrator.plan.show.compare import Compared


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
        SpecError: no combination of values makes a valid spec; has the problems of the first.
        BackendError: the cluster is unreachable.
    """
    found: list[Compared] = []
    invalid: list[SpecError] = []
    for values in combinations(compare):
        try:
            changed = (*overrides, *values)
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
        raise invalid[0]
    return found
