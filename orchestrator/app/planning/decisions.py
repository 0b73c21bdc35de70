"""What a planned job takes until it is done, with the time that failures cost."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.planning.planned_hosts import Purpose
from orchestrator.app.planning.plans import Planned
from orchestrator.contract.devices import CPU
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.plan.decision import Decision, Target, decide

WORTH_SAYING = 0.01
"""A smaller share of time without enough hosts, or for saving, is not mentioned."""


class Wish(Struct, frozen=True, kw_only=True):
    """Options of the command. None: from the spec and the inventory."""

    tokens: float | None = None
    price: float | None = None
    usual_price: float | None = None
    """The user's setting, for an inventory without a price."""
    purpose: Purpose = "look"
    """`predict` to plan without what earlier jobs measured."""


def decision_of(
    planned: Planned, environ: Mapping[str, str], inventory: Path | None, wish: Wish
) -> Decision | None:
    """None if the speed of the plan is not known, as for the user's own program."""
    spec, plan = planned.spec, planned.plan
    if plan.time is None or not isinstance(spec, JobSpec):
        return None
    per_step = spec.train.global_batch_size * spec.data.sequence_length
    share, basis = _effective(planned, environ, inventory)
    steps = f"train.steps={spec.train.steps:,}"
    target = Target(
        tokens=wish.tokens if wish.tokens is not None else per_step * spec.train.steps,
        tokens_from="--tokens" if wish.tokens is not None else steps,
        tokens_per_step=per_step,
        effective=share,
        effective_from=basis,
        price=wish.price,
        usual_price=wish.usual_price,
        spare_hosts=spec.cluster.spare_hosts,
    )
    return decide(plan, target)


def _effective(
    planned: Planned, environ: Mapping[str, str], inventory: Path | None
) -> tuple[float | None, str]:
    """The share of time that trains, in closed form, and what it rests on. Published failure rates
    are those of hosts with GPUs, so there is none for CPUs.

    A broken host is taken to be replaced after the time in the queue. Whether the inventory has
    another host is a question of its own, and only said.
    """
    if planned.plan.profile == CPU:
        return None, ""
    from orchestrator.app.planning.forecasts import hosts_there
    from orchestrator.forecast.closed_form import effective, short
    from orchestrator.forecast.rates import DEFAULT, rates_of
    from orchestrator.forecast.settings import QUEUE_S, Assumptions, basis_of

    assert isinstance(planned.spec, JobSpec)
    rates = rates_of(DEFAULT).for_devices(planned.plan.ranks_per_host)
    # Only a file is read again. A cluster is not asked twice for one plan.
    there = None if inventory is None else hosts_there(planned, environ, inventory)
    around = Assumptions(rates=rates, hosts_there=there)
    setting = basis_of(planned.spec, planned.plan, around).setting
    replaced = replace(setting, reserve=setting.hosts)
    basis = (
        f"at the failure rates of {DEFAULT}, if a broken host is replaced in {QUEUE_S / 60:g} min"
    )
    saving = setting.stalled_s / (setting.interval_s + setting.stalled_s)
    if saving > WORTH_SAYING:
        basis += (
            f"; saving checkpoints takes {saving:.1%} of the time, less with a larger"
            " checkpoint.every_steps"
        )
    waiting = short(setting)
    if inventory is not None and waiting > WORTH_SAYING:
        further = setting.spares + setting.reserve
        basis += (
            f"; the inventory has {further or 'no'} further host{'s' if further != 1 else ''}, so"
            f" the job would wait for repairs {waiting:.1%} of the time"
        )
    return effective(replaced), basis
