"""Settings that tests of the forecast begin with."""

from typing import Any

from orchestrator.forecast.rates import DAY_S, rates_of
from orchestrator.forecast.setting import Hazard, Setting

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
    """A job on so many hosts that break as is published; all detected within a minute."""
    table = rates_of(rates)
    hazards = tuple(
        Hazard(
            name=one.name,
            per_s=hosts * table.per_host_s(one),
            detection_s=60.0 if one.detected == "hang" else 10.0,
            takes_host=one.host == "leaves",
            planned=one.detected == "planned",
        )
        for one in table.classes
    )
    return setting(hosts=hosts, hazards=hazards, **changes)
