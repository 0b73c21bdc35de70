"""The forecast against published facts, and how long it takes for 100,000 devices over 90 days.

python -m benchmarks.forecast
"""

import sys
import time
from pathlib import Path

from msgspec.structs import replace

from benchmarks.measure.timing import machine
from orchestrator.app.planning.forecasts import Asked, forecast_spec
from orchestrator.forecast.monte_carlo import expect
from orchestrator.forecast.rates import DAY_S, Detected, rates_of
from orchestrator.forecast.setting import Setting
from orchestrator.forecast.settings import hazards_of

LIMIT_S = 300.0
"""For 12,500 hosts of eight devices over 90 days, on two cores."""
EXAMPLES = Path(__file__).parents[1] / "examples"
LARGE = ("cluster.hosts=12500", "cluster.spare_hosts=8", "train.global_batch_size=12500")
HISTORIES = 40
DETECTION_S: dict[Detected, float] = {"exit": 10.0, "host": 10.0, "hang": 60.0, "planned": 10.0}


def main() -> None:
    print(machine())
    print(f"{'published':62} {'said':>9} {'forecast':>9} {'error':>7}")
    llama = job(2048, "llama3", days=54, interval_s=1500.0, restart_s=300.0)
    found = expect(llama, range(HISTORIES))
    tell("Llama 3: unexpected interruptions, 16,384 H100, 54 days", 419, found.failures)
    short = replace(llama, interval_s=300.0, restart_s=120.0)
    words = f"Llama 3: effective time, above 0.9 ({expect(short, range(HISTORIES)).effective:.3f}"
    tell(f"{words} at 5 min, 2 min)", 0.9, found.effective)
    for gpus, hours in ((1_024, 7.9), (16_384, 1.8), (131_072, 0.23)):
        mtbf_h = job(gpus // 8, "rsc-1").mtbf_s / 3600
        tell(f"RSC-1: hours to failure of {gpus:,} A100", hours, mtbf_h)
    tell("RSC-2: minutes for interval and restart, 100,000 GPUs at 0.9", 2.0, minutes_for(0.9))
    sys.exit(0 if large() <= LIMIT_S else 1)


def tell(what: str, said: float, forecast: float) -> None:
    print(f"{what:62} {said:9.4g} {forecast:9.4g} {forecast / said - 1:+7.1%}")


def job(hosts: int, rates: str, days: float = 30.0, **changes: float) -> Setting:
    """Saves stand still for 5 s, and spares are always there."""
    hazards = hazards_of(rates_of(rates), hosts, DETECTION_S)
    given = {"interval_s": 1800.0, "restart_s": 180.0, **changes}
    return Setting(
        hosts=hosts,
        spares=16,
        reserve=hosts,
        horizon_s=days * DAY_S,
        hazards=hazards,
        stall_s=5.0,
        write_s=5.0,
        repair_s=DAY_S,
        queue_s=600.0,
        **given,  # type: ignore[arg-type]
    )


def minutes_for(share: float) -> float:
    """How long interval and restart, being equal, may be: by halving, in histories."""
    low, high = 1.0, 10.0  # below, saves cost more than they spare
    for _ in range(8):
        both = (low + high) / 2
        chosen = job(12_500, "rsc-2", interval_s=60 * both, restart_s=60 * both - 10.0)
        if expect(chosen, range(4)).effective > share:
            low = both
        else:
            high = both
    return low


def large() -> float:
    asked = Asked(
        days=90.0,
        rates="llama3",
        storage_gb_per_s=2000.0,
        repair_h=24.0,
        queue_s=600.0,
        histories=HISTORIES,
        seed=0,
    )
    begun, cpu = time.perf_counter(), time.process_time()
    told = forecast_spec(
        EXAMPLES / "llama3-405b.yaml", LARGE, {}, EXAMPLES / "inventories" / "h100-100k.yaml", asked
    )
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    found = told.found
    print(
        f"100,000 devices, 90 days, {HISTORIES} histories and {len(found.around) - 1} other"
        f" intervals: {took:.1f} s ({cpu:.1f} s of CPU), {took / LIMIT_S:.2f} of the limit"
    )
    print(
        f"  effective {found.expected.effective:.1%} every 100 steps, {found.best.effective:.1%} at"
        f" best, {found.expected.failures:,.0f} failures"
    )
    return took


if __name__ == "__main__":
    main()
