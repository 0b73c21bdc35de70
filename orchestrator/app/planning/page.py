"""`ndctl plan --html`: a plan as one HTML page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.app.planning.plans import Planned
from orchestrator.contract.codec import encode
from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.errors import SpecError
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.decision import Decision
from orchestrator.plan.memory.over_step import MemoryOverStep, over_step
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.page.page import HardwareNumber, Page, html_of
from orchestrator.plan.setup import setup_of_plan


def write_page(path: Path, planned: Planned, decision: Decision | None) -> int:
    """Write the page of a plan to `path`, and return its size in bytes.

    Raises:
        SpecError: the file cannot be written.
    """
    spec, plan = planned.spec, planned.plan
    memory: tuple[MemoryOverStep, ...] = ()
    if isinstance(spec, JobSpec):
        setup = setup_of_plan(spec, plan, shape_of(planned.model_config))
        memory = over_step(setup, plan)
    page = Page(
        job=spec.name,
        plan=plan,
        decision=decision,
        memory=memory,
        hardware=tuple(_hardware(plan.profile)),
    )
    data = html_of(page).encode()
    try:
        write_whole(path, data)
    except OSError as exc:
        raise SpecError(
            f"{path} cannot be written: {exc.strerror}", fix="name a file in a folder of yours"
        ) from exc
    return len(data)


def _hardware(name: str | None) -> Iterator[HardwareNumber]:
    """The numbers of a known profile that have a source."""
    if name not in PROFILE_NAMES:
        return
    profile = load_profile(name)
    values = encode(profile)
    for path, source in profile.sources.items():
        value: Any = values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            shown = f"{value:,.6g}" if isinstance(value, float) else str(value)
            yield HardwareNumber(name=path, value=shown, source=source)
