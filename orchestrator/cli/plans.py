"""Commands that start nothing: `validate`, `plan`, `inventory`."""

import os
import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli.options import (
    BACKENDS,
    Amount,
    FiniteRange,
    SoftwareName,
    inventory_option,
    json_option,
    keys_with_values,
    looks_for,
    plan_for,
    print_as,
    print_json,
    resume_option,
    root_option,
    say,
    set_option,
    spec_files,
)

if TYPE_CHECKING:
    from orchestrator.app.planning.planned_hosts import Purpose
    from orchestrator.app.planning.plans import Planned


@click.command(epilog="Example: ndctl validate examples/quickstart.yaml --set train.steps=100")
@spec_files
@set_option
@json_option
@inventory_option
@resume_option
@root_option
def validate(
    spec: str,
    overrides: tuple[str, ...],
    as_json: bool,
    inventory: str | None,
    resume: bool,
    run_root: str | None,
) -> None:
    """Check a job spec and report all errors at once.

    Checks that a plan exists, and that data, tokenizer and weights exist. With --resume, also
    checks that the job can resume.
    """
    from orchestrator.app.planning.problems import doubts_json, needed_to_submit, refused_json
    from orchestrator.errors import BackendError, NdctlError

    looks = looks_for(resume=resume)
    try:
        planned = plan_for(spec, overrides, inventory, run_root=run_root, looks=looks)
    except NdctlError as exc:
        if isinstance(exc, BackendError):
            message = f"{spec} is readable, but cannot be planned: {exc.message}"
            exc = BackendError(message, fix=exc.fix)
        if not as_json:
            raise exc from None
        print_json(refused_json(exc, spec))
        sys.exit(exc.exit_code)
    looked = planned.looked
    assert looked is not None
    if as_json:
        body: dict[str, object] = {"valid": True, "problems": doubts_json(planned, spec)}
        body |= {"name": planned.spec.name, "mesh": planned.plan.split}
        body |= {"resumes": looked.resumes} if resume else {}
        body |= {"untrainable": planned.plan.untrainable}
        doubts = [*looked.doubts, *needed_to_submit(planned.spec)]
        print_json(body | {"unchecked": looked.unchecked, "doubts": doubts})
        return
    if planned.plan.untrainable:
        from orchestrator.plan.show.explain import cannot_train

        say(f"WARNING: {cannot_train(planned.plan)}")
    from orchestrator.dashboard.format import count

    ranks = count(planned.plan.world_size, "rank")
    say(f"{spec}: valid; {ranks}, {planned.plan.split}")
    if looked.resumes:
        say(f"resumes {looked.resumes}")
    for note in (*from_user(planned), *looked.notes, *needed_to_submit(planned.spec)):
        say(f"note: {note}")


def from_user(planned: "Planned") -> tuple[str, ...]:
    """What the user's settings gave."""
    return () if planned.written is None else planned.written.from_user


@click.command(
    epilog="Example: ndctl plan examples/llama3-8b.yaml --inventory"
    " examples/inventories/h100.yaml --compare parallel.tp=1,2,4,8"
)
@spec_files
@set_option
@json_option
@inventory_option
@click.option(
    "--backend",
    type=BACKENDS,
    help="Plan for the hosts of this backend. [from the spec]",
)
@click.option(
    "--compare",
    multiple=True,
    callback=keys_with_values,
    metavar="KEY=A,B",
    help="Compare the plans for these values.",
)
@click.option(
    "--zero",
    is_flag=True,
    help="Show the memory that ZeRO stages 0 to 3 need on the same number of devices.",
)
@click.option(
    "--explain",
    metavar="AXIS=N,...",
    help="Put this mesh beside the plan, item by item, even if it cannot run.",
)
@click.option(
    "--no-history",
    is_flag=True,
    help="Predict the speed without what earlier jobs in the run root measured.",
)
@click.option(
    "--software",
    type=SoftwareName(),
    metavar="NAME",
    help="Predict the speed of this training software: torch, megatron or megatron-tp-overlap."
    " [torch]",
)
@click.option(
    "--tokens",
    type=Amount(),
    metavar="COUNT",
    help="Tokens to train, such as 15T, 300B or 1.5e12. [train.steps]",
)
@click.option(
    "--price",
    type=FiniteRange(min=0),
    metavar="PRICE",
    help="Price of a GPU for an hour, in any currency. [from the inventory]",
)
@click.option(
    "--html", "page", metavar="FILE", help="Also write the plan as a page without scripts."
)
def plan(  # noqa: PLR0913 - click hands over one argument for each option
    spec: str,
    overrides: tuple[str, ...],
    as_json: bool,
    inventory: str | None,
    backend: str | None,
    compare: tuple[str, ...],
    zero: bool,
    explain: str | None,
    no_history: bool,
    software: str | None,
    tokens: float | None,
    price: float | None,
    page: str | None,
) -> None:
    """Show the best way to split a job over ranks, its memory, its speed, and the reasons."""
    from pathlib import Path

    from orchestrator.app.planning import comparison, decisions, plans
    from orchestrator.job_paths import user_price
    from orchestrator.plan.show import compare as compared
    from orchestrator.plan.show import explain as explained
    from orchestrator.plan.show.beside import beside_json, describe_beside
    from orchestrator.plan.show.zero import describe_zero, zero_json

    if bool(compare) + zero + (explain is not None) > 1:
        raise click.UsageError("use only one of --compare, --zero and --explain")
    if page is not None and (compare or zero or explain is not None):
        raise click.UsageError("--html is the page of one plan, without other views of it")
    if zero and any(one is not None for one in (tokens, price, software)):
        raise click.UsageError("--zero shows memory alone, without --tokens, --price, --software")
    if backend is not None:
        overrides = (*overrides, f"cluster.backend={backend}")
    hosts = None if inventory is None else Path(inventory)
    purpose = _purpose(software, no_history=no_history)
    usual = user_price(os.environ)
    wish = decisions.Wish(tokens=tokens, price=price, usual_price=usual, purpose=purpose)
    if compare:
        found = comparison.compare_plans(Path(spec), overrides, os.environ, hosts, compare, wish)
        print_as(as_json, found, compared.compared_json, compared.describe_compared)
    elif zero:
        table = plans.zero_of(Path(spec), overrides, os.environ, hosts)
        print_as(as_json, table, zero_json, describe_zero)
    elif explain is not None:
        # Before the plan, so that all mistakes are reported at once.
        other = plans.spec_beside(Path(spec), overrides, explain.split(","), os.environ)
        planned = _noted(plan_for(spec, overrides, inventory, purpose=purpose))
        pair = (planned.plan, plans.beside_plan(planned, other))
        print_as(as_json, pair, lambda two: beside_json(*two), lambda two: describe_beside(*two))
    else:
        planned = _noted(plan_for(spec, overrides, inventory, purpose=purpose))
        planned = plans.with_prices(planned)
        decision = decisions.decision_of(planned, os.environ, hosts, wish)
        print_as(
            as_json,
            planned.plan,
            lambda found: explained.plan_json(found, decision),
            lambda found: explained.describe_plan(found, decision),
        )
        if page is not None:
            from orchestrator.app.planning.page import write_page

            size = write_page(Path(page), planned, decision)
            say(f"wrote {page} ({size / 1000:,.0f} kB)", err=True)


def _noted(planned: "Planned") -> "Planned":
    for note in from_user(planned):
        say(f"note: {note}", err=True)
    return planned


def _purpose(software: str | None, *, no_history: bool) -> "Purpose":
    from orchestrator.app.planning.planned_hosts import OtherSoftware

    if software is not None:
        return OtherSoftware(software)
    return "predict" if no_history else "look"


@click.command(epilog="Example: ndctl inventory --inventory examples/inventories/h100.yaml")
@click.option("--inventory", metavar="FILE", help="Show the hosts in FILE. [hosts of the backend]")
@click.option(
    "--backend",
    type=BACKENDS,
    default="local",
    help="Show the hosts of this backend. [local: this machine]",
)
@click.option("--partition", metavar="P", help="Only Slurm nodes in this partition.")
@click.option("--context", metavar="C", help="Context of the kubeconfig. [current context]")
@json_option
def inventory(
    inventory: str | None,
    backend: str,
    partition: str | None,
    context: str | None,
    as_json: bool,
) -> None:
    """Show the hosts and the switches between them as a tree."""
    from pathlib import Path

    from orchestrator.app.planning import plans
    from orchestrator.inventory.show import describe_inventory, inventory_json

    if inventory is not None and backend != "local":
        raise click.UsageError(f"use either --inventory or --backend {backend}, not both")
    if partition is not None and backend != "slurm":
        raise click.UsageError("--partition needs --backend slurm")
    if context is not None and backend != "kubernetes":
        raise click.UsageError("--context needs --backend kubernetes")
    file = None if inventory is None else Path(inventory)
    seen = plans.inventory_at(file, os.environ, backend, partition, context)
    if as_json:
        print_json(inventory_json(seen.inventory) | {"notes": list(seen.notes)})
    else:
        say("\n".join([describe_inventory(seen.inventory), *seen.notes]))
