"""Plans jobs without starting them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ndctl.client.errors import explained
from ndctl.client.settings import Spec, overrides_of, warnings_of, written_of
from ndctl.client.values import Plan


@explained
def plan(
    spec: Spec,
    *,
    set: Mapping[str, Any] | None = None,
    backend: str | None = None,
    inventory: str | os.PathLike[str] | None = None,
) -> Plan:
    """The best way to split a job over ranks, as `ndctl plan`. Nothing is started or written.

    Args:
        spec: path of a spec file, or a mapping with the same keys.
        set: keys to override, such as `{"parallel.tp": 8}`.
        backend: plan for the hosts of `local`, `slurm` or `kubernetes`. None: of the spec.
        inventory: file with the hosts to plan for. None: the hosts of the backend.

    Raises:
        SpecError, PlanError: with everything that is wrong. A PlanError names the nearest plans.
        BackendError: the cluster is unreachable.
    """
    import msgspec

    from orchestrator.app.planning.plans import plan_written
    from orchestrator.app.submission.spec_warnings import spec_warnings
    from orchestrator.plan.show.explain import describe_plan, plan_json

    written = written_of(spec, overrides_of(set, backend))
    hosts = None if inventory is None else Path(inventory)
    planned = plan_written(written, os.environ, hosts, purpose="look")
    warnings_of(spec_warnings(planned.spec, planned.plan))
    body = {**plan_json(planned.plan), "text": describe_plan(planned.plan)}
    return msgspec.convert(body, Plan)
