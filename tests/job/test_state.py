"""`EndedHosts`, a map that shares memory between versions, behaves as a plain dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.job.state import EndedHosts


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcd"), st.booleans())))
def test_each_version_of_ended_hosts_keeps_its_content(
    added: list[tuple[int, str, bool]],
) -> None:
    """This includes versions from which several newer ones were made."""
    versions = [(EndedHosts(), dict[str, bool]())]
    for index, host, finished in added:
        known, plain = versions[index % len(versions)]
        versions.append((known.adding(host, finished), {**plain, host: finished}))
    for known, plain in versions:
        assert dict(known) == plain
        assert len(known) == len(plain)
        assert {host for host in "abcd" if host in known} == plain.keys()
