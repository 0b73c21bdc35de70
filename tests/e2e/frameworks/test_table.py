"""The table of frameworks in docs/own_scripts.md agrees with the scripts."""

import re

from tests.e2e.frameworks.script_job import SCRIPTS
from tests.e2e.job import ROOT

TABLE = (ROOT / "docs" / "own_scripts.md").read_text()


def test_the_table_counts_the_lines_that_are_about_ndctl() -> None:
    counts = dict(re.findall(r"\| \[(\w+\.py)\]\([^)]+\) \| (\d+) \|", TABLE))
    assert counts
    for name, count in counts.items():
        code = (SCRIPTS / name).read_text().split('"""', 2)[2]
        lines = [line for line in code.splitlines() if re.search(r"\bndctl\b", line)]
        assert len(lines) == int(count), name
