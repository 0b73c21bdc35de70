"""Alert rules and dashboard use metrics that exist, and Grafana's own schema knows every key."""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from orchestrator.web.metrics.families import FAMILIES
from tests.manifests.monitoring import FOLDER, operators_rules

NAME = re.compile(r"\bndctl_\w+")
KNOWN = {f"{one.name}_total" if one.counts else one.name for one in FAMILIES} | {
    "ndctl_unreadable_jobs",
    "ndctl_host_strikes",
}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return read


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What `after` does not have of `before`."""
    if isinstance(before, dict):
        for key, value in before.items():
            if not isinstance(after, dict) or key not in after:
                yield f"{place}/{key}"
            else:
                yield from lost(value, after[key], f"{place}/{key}")
    elif isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            yield place
        else:
            for number, pair in enumerate(zip(before, after, strict=True)):
                yield from lost(*pair, f"{place}/{number}")
    elif before != after:
        yield place


def test_grafana_knows_every_key_of_the_dashboard() -> None:
    plugins.register_default_plugins()
    written = dashboard()
    assert written["panels"]
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert list(lost(written, read)) == []
    # The comparison notices a key that Grafana does not know.
    wrong = {**written, "refreshes": "30s"}
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(wrong)))
    assert list(lost(wrong, again)) == ["/refreshes"]


def test_dashboard_and_rules_use_metrics_that_exist() -> None:
    for text in ((FOLDER / "rules.yaml").read_text(), json.dumps(dashboard())):
        used = set(NAME.findall(text))
        assert len(used) > 5
        assert used <= KNOWN


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in dashboard()["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_operators_rules_are_the_plain_ones() -> None:
    written = (FOLDER / "prometheusrule.yaml").read_text()
    assert written == operators_rules()
    rules = yaml.safe_load((FOLDER / "rules.yaml").read_text())
    assert yaml.safe_load(written)["spec"] == rules
