"""The margin below which two plans count as equally fast."""

from benchmarks.planner.comparison import FILE, pairs, report, text_of, typical
from benchmarks.published.compared import compare
from benchmarks.published.runs import runs


def test_the_margin_is_that_of_the_published_runs() -> None:
    """If not: `python -m benchmarks.planner.comparison --write`."""
    assert FILE.read_text() == text_of(pairs(compare(runs())))


def test_within_the_margin_the_planner_does_not_know_which_mesh_is_faster() -> None:
    """Within it the one planned faster is often the slower one, and a choice of the other one costs
    less than the margin in the mean; beyond it the planner is mostly right."""
    found = pairs(compare(runs()))
    margin = typical(found)
    close = [pair.gain for pair in found if pair.difference <= margin]
    apart = [pair.gain for pair in found if pair.difference > margin]
    assert sum(gain > 0 for gain in close) < 0.7 * len(close)
    assert sum(gain > 0 for gain in apart) > 0.8 * len(apart)
    assert sum(close) / len(close) < margin


def test_pairs_have_one_model_on_the_same_hosts_with_other_meshes() -> None:
    found = pairs(compare(runs()))
    assert all(one.run.model == other.run.model for one, other in found)
    assert all(one.run.fabric.hosts == other.run.fabric.hosts for one, other in found)
    assert all(one.run.setup.mesh != other.run.setup.mesh for one, other in found)
    assert f"| all | {len(found)} |" in report(found)
