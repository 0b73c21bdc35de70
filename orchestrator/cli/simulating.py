"""`ndctl simulate`: run the supervisor on simulated clusters with faults."""

import os
import sys

import click

from orchestrator.cli.options import (
    json_option,
    print_json,
    say,
)

MANY = 1000


@click.command(epilog="Example: ndctl simulate --seeds 1000 --faults leader,partition")
@click.option("--seeds", type=click.IntRange(min=1), help="Number of seeds. [1000]")
@click.option("--from", "first", type=int, help="First seed. [0]")
@click.option("--seed", type=int, help="Run only this seed.")
@click.option("--faults", metavar="KINDS", help="Kinds of faults, separated by commas. [all]")
@click.option("--trace", is_flag=True, help="Print the history of --seed.")
@json_option
def simulate(
    seeds: int | None,
    first: int | None,
    seed: int | None,
    faults: str | None,
    trace: bool,
    as_json: bool,
) -> None:
    """Run the supervisor on simulated clusters with faults, and check that no law is broken."""
    from orchestrator.simulation import many_seeds
    from orchestrator.simulation.run import simulate as simulate_one
    from orchestrator.system import SystemClock

    kinds = _kinds(faults)
    chosen = _seeds(seeds, first, seed)
    if trace and seed is None:
        raise click.UsageError("--trace needs --seed")
    if trace and as_json:
        raise click.UsageError("--trace prints text, so it cannot be combined with --json")
    if trace and seed is not None:
        outcome = simulate_one(seed, kinds, keep_history=True)
        say("\n".join(outcome.history))
        say(outcome.broken or outcome.ending)
        sys.exit(1 if outcome.broken else 0)
    clock = SystemClock()
    begun = clock.monotonic()
    processes = min(len(os.sched_getaffinity(0)), 1 + len(chosen) // many_seeds.CHUNK)
    total = many_seeds.summarise(many_seeds.outcomes(chosen, kinds, processes))
    took_s = clock.monotonic() - begun
    if as_json:
        print_json(many_seeds.as_json(total, kinds, took_s))
    else:
        say(many_seeds.text(total, kinds, took_s))
    sys.exit(1 if total.broken else 0)


def _seeds(seeds: int | None, first: int | None, seed: int | None) -> range:
    if seed is None:
        first = first or 0
        return range(first, first + (seeds or MANY))
    if seeds is not None or first is not None:
        raise click.UsageError("--seed cannot be combined with --seeds or --from")
    return range(seed, seed + 1)


def _kinds(faults: str | None) -> tuple[str, ...]:
    from orchestrator.simulation.scenario import KINDS

    if faults is None:
        return tuple(KINDS)
    kinds = tuple(kind.strip() for kind in faults.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        known = "".join(f"\n  {kind}: {words}" for kind, words in KINDS.items())
        raise click.BadParameter(
            f"unknown: {', '.join(unknown)}; known kinds:{known}", param_hint="--faults"
        )
    return kinds
