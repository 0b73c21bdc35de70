"""Parts of the state that are built for speed behave as the plain ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.job.progress import Attempt
from orchestrator.job.state import EndedHosts, changed


def test_changed_is_replace_and_leaves_the_record_alone() -> None:
    before = Attempt(number=3, placement=("a", "b"))
    after = changed(before, step=7, drills=(1,))
    assert after == replace(before, step=7, drills=(1,))
    assert before == Attempt(number=3, placement=("a", "b"))


def test_changed_refuses_a_field_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"not a field of Attempt: {'steps'}"):
        changed(Attempt(), steps=7)


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcd"), st.booleans())))
def test_each_version_of_ended_hosts_keeps_its_content(
    added: list[tuple[int, str, bool]],
) -> None:
    """Also the versions from which several newer ones were made."""
    versions = [(EndedHosts(), dict[str, bool]())]
    for index, host, finished in added:
        known, plain = versions[index % len(versions)]
        versions.append((known.adding(host, finished), {**plain, host: finished}))
    for known, plain in versions:
        assert dict(known) == plain
        assert len(known) == len(plain)
        assert {host for host in "abcd" if host in known} == plain.keys()
