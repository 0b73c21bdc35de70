"""Settings for tests of the forecast."""

from typing import Any

from orchestrator.forecast.rates import DAY_S, Detected, rates_of
from orchestrator.forecast.setting import Hazard, Setting
from orchestrator.forecast.settings import hazards_of

DETECTION_S: dict[Detected, float] = {"exit": 10.0, "host": 10.0, "hang": 60.0, "planned": 10.0}
CRASH = Hazard(name="crash", per_s=1 / 10_000, detection_s=2.0, takes_host=True)


def setting(**changes: Any) -> Setting:
    plain: dict[str, Any] = {
        "hosts": 100,
        "spares": 2,
        "reserve": 1000,
        "horizon_s": 30 * DAY_S,
        "hazards": (CRASH,),
        "interval_s": 600.0,
        "stall_s": 2.0,
        "write_s": 30.0,
        "restart_s": 180.0,
        "repair_s": DAY_S,
        "queue_s": 600.0,
    }
    return Setting(**{**plain, **changes})


def published(hosts: int, rates: str, **changes: Any) -> Setting:
    """A job whose hosts fail at published rates. A failure is detected within a minute."""
    hazards = hazards_of(rates_of(rates), hosts, DETECTION_S)
    return setting(hosts=hosts, hazards=hazards, **changes)
