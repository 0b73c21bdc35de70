"""Ranks that hang in real jobs, on every axis: who is blamed, and that nobody is blamed wrongly."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(900),
]

AXES = {
    "fsdp-tp": {},
    "hsdp": {"parallel__dp_replicate": "2", "parallel__tp": "1"},
    "pp-cp": {"parallel__pp": "2", "parallel__cp": "2", "parallel__tp": "1"},
}
ONCE = {
    "train__steps": "16",
    "checkpoint__every_steps": "100",
    "resilience__max_restarts": "0",
}
MACHINES = ("stop", "busy", "data")
"""Faults of the rank itself; the others are the program's, for which no host is blamed."""


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("fault", [*MACHINES, "skip", "order", "shape"])
def test_a_rank_that_hangs_is_named_or_nobody_is(
    ndctl: Ndctl, fault: str, axes: str, tmp_path: Path
) -> None:
    rank = 2
    ndctl.submit("--follow", "--drill", f"{fault}:rank={rank}@step=6", **ONCE, **AXES[axes])
    (incident,) = ndctl.status()["incidents"]
    culprit = incident["culprit"]
    assert culprit["rank"] in (rank, None), incident["cause"]
    if fault in MACHINES:
        assert incident["kind"] == "hang"
        assert culprit in ({"host": "host-1", "rank": rank}, {"host": None, "rank": None})
        said = json.loads(ndctl("diagnose", "e2e", "--json").out)
        assert said["ranks"][:1] in ([rank], []), "the same files, the same verdict"
    else:
        assert culprit["host"] is None or incident["kind"] != "hang"
    assert_nothing_left(ndctl.run_dir)
