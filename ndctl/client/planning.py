"""Plans jobs without starting them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndctl.client.errors import explained
from ndctl.client.settings import Spec, overrides_of, warnings_of, written_of
from ndctl.client.values import Plan

if TYPE_CHECKING:
    from orchestrator.app.planning.planned_hosts import Purpose


@explained
def plan(  # noqa: PLR0913 - keyword arguments, one for each option of the command
    spec: Spec,
    *,
    set: Mapping[str, Any] | None = None,
    backend: str | None = None,
    inventory: str | os.PathLike[str] | None = None,
    tokens: float | None = None,
    price: float | None = None,
    history: bool = True,
) -> Plan:
    """The best way to split a job over ranks, as `ndctl plan`. Nothing is started or written.

    Args:
        spec: path of a spec file, or a mapping with the same keys.
        set: keys to override, such as `{"parallel.tp": 8}`.
        backend: plan for the hosts of `local`, `slurm` or `kubernetes`. None: of the spec.
        inventory: file with the hosts to plan for. None: the hosts of the backend.
        tokens: tokens to train, for `decision`. None: those of `train.steps`.
        price: price of a GPU for an hour, in any currency. None: of the inventory.
        history: whether earlier jobs of the run root correct the speed.

    Raises:
        ValueError: `tokens` is not above 0, `price` is below 0, or one of them is not finite.
        SpecError, PlanError: with everything that is wrong. A PlanError names the nearest plans.
        BackendError: the cluster is unreachable.
    """
    import msgspec

    from orchestrator.app.planning.decisions import Wish, decision_of
    from orchestrator.app.planning.plans import plan_written, with_prices
    from orchestrator.app.submission.spec_warnings import spec_warnings
    from orchestrator.plan.show.explain import describe_plan, plan_json

    if tokens is not None and not (math.isfinite(tokens) and tokens > 0):
        raise ValueError(f"tokens must be a positive number, got {tokens!r}")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price must be a number of at least 0, got {price!r}")
    written = written_of(spec, overrides_of(set, backend))
    hosts = None if inventory is None else Path(inventory)
    purpose: Purpose = "look" if history else "predict"
    planned = plan_written(written, os.environ, hosts, purpose=purpose)
    warnings_of(spec_warnings(planned.spec, planned.plan))
    wish = Wish(tokens=tokens, price=price, purpose=purpose)
    decision, priced = decision_of(planned, os.environ, hosts, wish), with_prices(planned).plan
    body = {
        "decision": None,
        **plan_json(priced, decision),
        "text": describe_plan(priced, decision),
    }
    return msgspec.convert(body, Plan)
