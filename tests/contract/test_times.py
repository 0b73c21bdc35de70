"""Times for people come from one function."""

import re
from datetime import timedelta, timezone
from pathlib import Path

from orchestrator.contract.times import date_time, short_date_time

ROOT = Path(__file__).parents[2]
FOR_PROGRAMS = {
    "orchestrator/contract/times.py": "the function itself",
    "orchestrator/journal/run_dir_init.py": "name of an archived folder",
    "orchestrator/backends/kubernetes/observe/reports.py": "RFC 3339 of an object",
}
"""Other files that format a time, for a program."""


def test_a_time_has_its_date_and_its_zone() -> None:
    assert date_time(1_700_000_000) == "2023-11-14 22:13:20 UTC"
    zone = timezone(timedelta(hours=-8), "PST")
    assert date_time(1_700_000_000, zone) == "2023-11-14 14:13:20 PST"
    assert short_date_time(1_700_000_000, zone) == "11-14 14:13:20"


def test_no_other_file_formats_a_time() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "orchestrator").rglob("*.py")
        if re.search(r"strftime|%H:%M", path.read_text())
    }
    assert found == {*FOR_PROGRAMS}
