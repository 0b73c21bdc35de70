"""Which hosts are named unfit, from the reports of the all-reduce check."""

from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.messages.agent_protocol import Checked, Link
from orchestrator.detect.fabric import judge

USUAL_S, SLOW_S = 0.002, 0.08


def host_names(count: int) -> tuple[str, ...]:
    return tuple(f"h{i}" for i in range(count))


def failed(host: str, *waited_for: str, state: str = "waited") -> Checked:
    assert state in ("waited", "broke")
    return Checked(
        check=1,
        host=host,
        state="broke" if state == "broke" else "waited",
        waited_for=waited_for,
        why="its check broke" if state == "broke" else "",
    )


def by_host(*reports: Checked) -> dict[str, Checked]:
    return {report.host: report for report in reports}


def ring_reports(
    hosts: Sequence[str], slow_hosts: Collection[str] = (), slow_links: Collection[int] = ()
) -> Mapping[str, Checked]:
    """Measured times if all links of some hosts are slow, and some single links too."""
    count = len(hosts)

    def seconds_of(first: int) -> float:
        ends = {hosts[first], hosts[(first + 1) % count]}
        return SLOW_S if first in slow_links or ends & set(slow_hosts) else USUAL_S

    def link(i: int) -> tuple[Link, ...]:
        after = Link(peer=hosts[(i + 1) % count], seconds=seconds_of(i))
        before = Link(peer=hosts[i - 1], seconds=seconds_of((i - 1) % count))
        return (after, before) if count > 2 else (Link(peer=hosts[1 - i], seconds=seconds_of(0)),)

    return by_host(
        *(Checked(check=1, host=host, state="ok", links=link(i)) for i, host in enumerate(hosts))
    )


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 63, 64])
def test_no_host_is_named_if_all_checks_pass(count: int) -> None:
    assert judge(host_names(count), ring_reports(host_names(count))) == {}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 16, 63, 64])
def test_the_host_whose_both_links_are_slow_is_named(count: int) -> None:
    hosts = host_names(count)
    for bad in {hosts[0], hosts[1], hosts[count // 2], hosts[-1]}:
        found = judge(hosts, ring_reports(hosts, [bad]))
        assert list(found) == [bad]
        assert found[bad] == "its links to both neighbours take 80 ms and 80 ms, others 2 ms"


def test_with_two_hosts_neither_is_called_slow() -> None:
    assert judge(host_names(2), ring_reports(host_names(2), ["h1"])) == {}


@pytest.mark.parametrize("count", [4, 8, 64])
def test_a_slow_link_between_good_hosts_names_no_host(count: int) -> None:
    assert judge(host_names(count), ring_reports(host_names(count), slow_links=[1])) == {}


@pytest.mark.parametrize("count", [8, 16])
def test_slow_neighbours_are_named_and_one_between_two_of_them_is_not(count: int) -> None:
    hosts = host_names(count)
    assert list(judge(hosts, ring_reports(hosts, ["h2", "h3"]))) == ["h2", "h3"]
    assert list(judge(hosts, ring_reports(hosts, ["h2", "h4"]))) == ["h2", "h4"]


def test_times_too_short_to_matter_are_never_slow() -> None:
    hosts = host_names(4)
    fast = {
        host: Checked(
            check=1,
            host=host,
            state="ok",
            links=tuple(Link(peer=link.peer, seconds=link.seconds / 40) for link in report.links),
        )
        for host, report in ring_reports(hosts, ["h1"]).items()
    }
    assert judge(hosts, fast) == {}


def test_a_slow_link_takes_more_than_the_limit_times_the_usual() -> None:
    hosts = host_names(8)
    assert judge(hosts, ring_reports(hosts, ["h1"]), limit=100.0) == {}
    assert list(judge(hosts, ring_reports(hosts, ["h1"]), limit=10.0)) == ["h1"]


@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("own", ["broke", "mute"])
def test_a_host_that_the_others_wait_for_is_named(count: int, own: str) -> None:
    hosts = host_names(count)
    bad = hosts[-1]
    reports = dict(by_host(*(failed(host, bad) for host in hosts[:-1])))
    if own == "broke":
        reports[bad] = failed(bad, state="broke")
    found = judge(hosts, reports)
    assert list(found) == [bad]
    assert found[bad] == (
        "its check broke" if own == "broke" else "it sent no report of the check of all hosts"
    )


def test_a_host_that_is_cut_off_is_named_although_it_reports_the_others() -> None:
    hosts = host_names(4)
    others = [failed(host, "h2") for host in hosts if host != "h2"]
    found = judge(hosts, by_host(*others, failed("h2", "h0")))
    assert found == {"h2": "3 of 3 other hosts timed out waiting for it"}


def test_two_hosts_that_wait_for_each_other_are_not_named() -> None:
    assert judge(host_names(2), by_host(failed("h0", "h1"), failed("h1", "h0"))) == {}


@pytest.mark.parametrize("count", [4, 8, 64])
def test_a_network_split_in_halves_names_no_host(count: int) -> None:
    hosts = host_names(count)
    halves = [hosts[: count // 2], hosts[count // 2 :]]
    reports = by_host(
        *(failed(host, *halves[1 - side]) for side in (0, 1) for host in halves[side])
    )
    assert judge(hosts, reports) == {}


def test_the_smaller_part_of_a_split_network_is_named() -> None:
    hosts = host_names(8)
    part = ("h6", "h7")
    reports = by_host(
        *(failed(host, *part) for host in hosts[:6]), *(failed(host, "h0") for host in part)
    )
    assert list(judge(hosts, reports)) == ["h6", "h7"]


def test_among_a_thousand_hosts_those_that_most_hosts_wait_for_are_named() -> None:
    """The leader's event loop waits for this, so it must be fast."""
    hosts = host_names(1024)
    missing = hosts[-500:]
    reports = by_host(*(failed(host, *missing) for host in hosts[:-500]))
    assert judge(hosts, reports) == dict.fromkeys(
        missing, "it sent no report of the check of all hosts"
    )
    reports |= by_host(*(failed(host) for host in missing))
    assert judge(hosts, reports) == dict.fromkeys(
        missing, "524 of 1023 other hosts timed out waiting for it"
    )


def test_a_failure_of_all_hosts_names_no_host() -> None:
    hosts = host_names(4)
    assert judge(hosts, {}) == {}
    assert judge(hosts, by_host(*(failed(host, state="broke") for host in hosts))) == {}


def test_peers_that_are_alive_but_cannot_reach_each_other_name_no_host() -> None:
    hosts = host_names(4)
    assert judge(hosts, by_host(*(failed(host) for host in hosts))) == {}


@given(st.data())
def test_never_more_than_half_are_named(data: st.DataObject) -> None:
    hosts = host_names(data.draw(st.integers(2, 16)))
    some = st.lists(st.sampled_from(hosts), max_size=8, unique=True)
    reports = {}
    for host in data.draw(st.lists(st.sampled_from(hosts), unique=True)):
        state = data.draw(st.sampled_from(["waited", "broke"]))
        reports[host] = failed(host, *data.draw(some), state=state)
    found = judge(hosts, reports)
    assert 2 * len(found) <= len(hosts)
    slow = judge(
        hosts, ring_reports(hosts, data.draw(some), data.draw(st.sets(st.integers(0, 15))))
    )
    assert 2 * len(slow) <= len(hosts)
