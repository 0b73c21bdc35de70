"""The hosts that a failed allreduce check names as missing, for each answer of the store."""

import time
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore, Store

from trainer.rank.allreduce_check import NAMED, Check, find_missing
from trainer.rank.heartbeat_store import prepare

HOSTS = ("node1", "node2", "node3", "node4")
SOON_S = 0.05


def a_check(rank: int, hosts: tuple[str, ...] = HOSTS) -> Check:
    ends = time.monotonic() + 60.0
    return Check(number=1, rank=rank, hosts=hosts, address="127.0.0.1", port=1, ends=ends)


def connected(check: Check, store: Store) -> Check:
    check.heartbeat.store = store
    check.heartbeat.connected.set()
    return check


class CheckedStore(HashStore):
    """A store in which rank 0 checks the heartbeats whenever its number of checks is read."""

    def add(self, key: str, value: int) -> int:
        return super().add(key, 1 if key == "looks" else value)


def a_store(found: str, kind: Callable[[], Store] = CheckedStore) -> Store:
    store = kind()
    prepare(store, len(HOSTS))
    store.set("missing", found)
    return store


@pytest.mark.parametrize(
    ("found", "names", "words"),
    [
        ("", (), "all other hosts are alive"),
        ("1", (), "all other hosts are alive"),
        ("1 2", ("node3",), "no heartbeat from node3"),
        ("0 2", ("node1", "node3"), "no heartbeat from node1, node3"),
    ],
)
def test_a_rank_reports_the_hosts_that_rank_0_found_except_its_own(
    found: str, names: tuple[str, ...], words: str
) -> None:
    assert find_missing(connected(a_check(1), a_store(found))) == (names, words)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_too_slow_names_no_host(rank: int) -> None:
    check = connected(a_check(rank), a_store("2", HashStore))
    assert find_missing(check, SOON_S) == (
        (),
        "the store did not say in time which hosts are missing",
    )


def test_if_the_store_is_unreachable_its_host_is_named() -> None:
    words = "the store on node1 is unreachable"
    assert find_missing(a_check(1), SOON_S) == (("node1",), words)


def test_the_host_of_the_store_does_not_name_itself() -> None:
    assert find_missing(a_check(0), SOON_S)[0] == ()


def test_the_text_names_only_a_few_of_many_hosts() -> None:
    hosts = tuple(f"n{i}" for i in range(2000))
    check = connected(a_check(1, hosts), a_store(" ".join(map(str, range(1000, 2000)))))
    names, words = find_missing(check)
    assert names == hosts[1000:]
    assert words.endswith(f"n1007 and {1000 - NAMED} more")
