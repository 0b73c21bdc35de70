"""Heartbeats of ranks in a store, with a simulated clock, and with 100 clients of a real store."""

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from trainer.rank.heartbeat_store import (
    BEAT_S,
    GONE,
    LATE_S,
    LOOK_S,
    HeartbeatClient,
    all_gone,
    beats,
    missing,
    pause,
    prepare,
    stopped_ranks,
    watch,
)

LIMIT_S = timedelta(seconds=60)


class Ends(RuntimeError):
    """Ends `watch`, as when the store is gone."""


class Steps:
    """A clock that only pauses advance. Each pause runs the next step."""

    def __init__(self, *steps: object) -> None:
        self.now = 0.0
        self.steps = iter(steps)

    def pause(self, seconds: float) -> None:
        self.now += seconds
        step = next(self.steps, None)
        if step is None:
            raise Ends
        assert callable(step)
        step()


def beating(store: Store, *ranks: int) -> None:
    for rank in ranks:
        store.add(f"beat/{rank}", 1)


def test_a_rank_that_stopped_is_missing_and_one_that_left_is_not() -> None:
    assert stopped_ranks([3, 3, 0, GONE + 4, 7], [4, 3, 0, GONE + 4, GONE + 7]) == [1, 2]


def test_rank_0_records_ranks_without_a_beat_between_two_checks() -> None:
    store = HashStore()
    prepare(store, 4)
    seen: list[bytes] = []

    def see_and_beat() -> None:
        seen.append(store.get("missing"))
        beating(store, 0, 1, 2, 3)

    steps = Steps(
        lambda: beating(store, 0, 1), see_and_beat, lambda: seen.append(store.get("missing"))
    )
    with pytest.raises(Ends):
        watch(store, 4, lambda: steps.now, steps.pause)
    assert seen == [b"2 3", b""]
    assert store.get("missing") == b"0 1 2 3"
    assert steps.now == 4 * LOOK_S


class SlowStore(HashStore):
    """A store that takes `takes_s` to answer a read of all heartbeats."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        self.takes_s = 0.0

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.steps.now += self.takes_s
        return super().multi_get(keys)


@pytest.mark.parametrize(("takes_s", "looks"), [(LATE_S / 2, 2), (2 * LATE_S, 0)])
def test_an_outdated_store_names_no_rank(takes_s: float, looks: int) -> None:
    steps = Steps(lambda: None, lambda: None)
    store = SlowStore(steps)
    prepare(store, 2)
    store.takes_s = takes_s
    with pytest.raises(Ends):
        watch(store, 2, lambda: steps.now, steps.pause)
    assert store.add("looks", 0) == looks
    assert store.get("missing") == (b"0 1" if looks else b"")


def test_a_check_that_began_before_the_query_does_not_answer_it() -> None:
    """A rank that stopped just now still had a heartbeat in the check that is running."""
    store = HashStore()
    prepare(store, 3)
    store.add("looks", 7)
    store.set("missing", "1")

    def look(found: str) -> None:
        store.set("missing", found)
        store.add("looks", 1)

    steps = Steps(lambda: None, lambda: look("1"), lambda: None, lambda: look("1 2"))
    assert missing(store, steps.pause) == (1, 2)


def test_all_ranks_are_gone_after_each_has_left() -> None:
    store = HashStore()
    prepare(store, 3)
    for rank in (1, 2):
        assert not all_gone(store, 3)
        HeartbeatClient(rank, lambda: store, store).leave()
    assert all_gone(store, 3)
    assert beats(store, 3) == [0, GONE, GONE]


def test_a_rank_that_leaves_before_its_first_beat_says_so() -> None:
    """Its heartbeat thread may not have started when its part of the check is done."""
    store = HashStore()
    early = HeartbeatClient(1, lambda: store)
    early.leave()
    prepare(store, 2)
    assert all_gone(store, 2)
    early.beat()
    assert beats(store, 2) == [0, GONE]


class CountingStore(HashStore):
    """A store that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def add(self, key: str, value: int) -> int:
        self.requests += 1
        return super().add(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return super().get(key)


def requests_of_one_host(count: int) -> int:
    store = CountingStore()
    prepare(store, count)
    store.requests = 0
    client = HeartbeatClient(1, lambda: store, store)
    missing(store, lambda _: store.set("looks", "2"))
    client.leave()
    return store.requests


def test_the_requests_of_a_host_do_not_grow_with_the_number_of_hosts() -> None:
    assert requests_of_one_host(2) == requests_of_one_host(2048) == 5


@pytest.mark.process
def test_a_hundred_hosts_that_ask_at_once_all_name_the_one_that_stopped() -> None:
    count, dead = 100, 63
    server = TCPStore("127.0.0.1", 0, None, True, LIMIT_S, wait_for_workers=False)
    prepare(server, count)

    def connect() -> Store:
        return TCPStore("127.0.0.1", server.port, None, False, LIMIT_S)

    living = [HeartbeatClient(rank, connect) for rank in range(count) if rank != dead]
    answers: dict[int, tuple[int, ...] | None] = {}

    def ask(client: HeartbeatClient) -> None:
        assert client.connected.wait(LIMIT_S.seconds)
        answers[client.rank] = client.ask()

    def until_all_moved(_: float) -> None:
        """Pause until every client has sent a beat, as a second is too short on a busy machine."""
        if len(answers) == len(living):
            raise Ends
        before = beats(server, count)
        while any(beats(server, count)[client.rank] == before[client.rank] for client in living):
            pause(BEAT_S)

    threads = [threading.Thread(target=client.beat) for client in living]
    threads += [threading.Thread(target=ask, args=(client,)) for client in living]
    for thread in threads:
        thread.start()
    with pytest.raises(Ends):
        watch(server, count, lambda: 0.0, until_all_moved)
    for client in living:
        client.leave()
    for thread in threads:
        thread.join()
    assert {*answers.values()} == {(dead,)}
