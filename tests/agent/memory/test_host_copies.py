"""Agents copy slots to partners, and fetch them back: real connections, real memory."""

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import get_native_id

import pytest
from msgspec.structs import replace

from ndctl.rank.priority import NICE
from orchestrator.agent.memory import host_copies, line, server
from orchestrator.agent.memory.held import HeldCopies, Refused
from orchestrator.agent.memory.line import Broken, connect
from orchestrator.agent.memory.slots import ALONE
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.memory.peers import CopyPlan, Peer
from orchestrator.contract.memory.slot_file import (
    NOT_SENT,
    SENDING,
    SENT,
    Label,
    clear,
    label_of,
    mark_of,
)
from orchestrator.contract.messages.agent_protocol import Claim
from orchestrator.contract.messages.rank_messages import CopiesEnded, CopyReady
from orchestrator.job_secret import client_context, draw, secret_from
from tests.agent.memory.two_hosts import (
    SLOT_BYTES,
    TwoHosts,
    begin,
    content,
    fill,
    host,
    in_loop,
    label,
    peer_of,
    read,
    send,
    slot_of,
    steps,
    wanted,
)
from tests.agent.processes.test_torchrun import START
from tests.agent.world import SECRET

STRANGER = secret_from(draw())


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    before = _memory_files()
    both = TwoHosts(host("a", tmp_path / "a"), host("b", tmp_path / "b"))
    yield both
    both.close()
    assert _memory_files() == before, "no memory is left"


def _memory_files() -> list[str]:
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = str(file.readlink())
        except OSError:
            continue
        if "ndctl-checkpoint" in target:
            found.append(target)
    return found


@in_loop
async def test_a_lost_hosts_slot_comes_back_from_its_partner(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    await hosts.start()
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    hosts.first.close()
    hosts.first = host("a2", tmp_path / "a2")
    peer = await peer_of(hosts.second)
    assert steps(await hosts.second.offer(2), rank=0) == [5]
    plan = CopyPlan(wanted=(wanted(label(0, 5), peer),), restored=Made(step=5, attempt=1))
    await begin(hosts.first, 0, plan, attempt=2)
    assert read(slot_of(hosts.first, 0)) == (label(0, 5), content(0, 5))


@in_loop
async def test_a_partner_keeps_the_newest_copy_that_all_ranks_have(hosts: TwoHosts) -> None:
    await hosts.start()
    for step, shared in ((5, None), (6, 5), (7, 5), (8, 5)):
        # The copies of steps 6 and 7 did not arrive at another rank's partner.
        assert await send(hosts.first, step % 2, label(0, step, shared=shared)) == SENT
        assert 5 in steps(await hosts.second.offer(2), rank=0)
    assert await send(hosts.first, 0, label(0, 9, shared=8)) == SENT
    found = await hosts.second.offer(2)
    assert steps(found, rank=0) == [8, 9]
    use = hosts.second.use()
    assert (use.num_bytes, use.held) == (2 * SLOT_BYTES, 2), "two copies of a rank at most"
    assert use.copied_s is None, "nobody has copies of its own slots"
    sent = hosts.first.use()
    assert sent.copied_s is not None
    assert sent.num_bytes == 2 * SLOT_BYTES


@in_loop
async def test_a_slot_that_changes_while_it_is_sent_is_no_copy(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.start()
    file = slot_of(hosts.first, 0)
    preadv = os.preadv

    def overwritten_at_the_end(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if fd == file and at == SLOT_BYTES - line.CHUNK_BYTES:
            clear(file)
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", overwritten_at_the_end)
    fill(file, label(0, 5))
    hosts.first.ready(CopyReady(attempt=1, rank=0, step=5, slot=0, copies=1))
    await asyncio.to_thread(_until_nothing_is_sent, hosts)
    assert steps(await hosts.second.offer(2), rank=0) == []


def _until_nothing_is_sent(hosts: TwoHosts) -> None:
    while hosts.first.sending:
        time.sleep(0.01)


@in_loop
async def test_a_partner_that_is_gone_or_refuses_holds_nothing_up(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    await hosts.start()
    hosts.second.held.allow((), 1)
    assert await send(hosts.first, 0, label(0, 5)) == NOT_SENT
    hosts.second.held.allow((0,), 2)
    assert await send(hosts.first, 0, label(0, 6)) == NOT_SENT, "its attempt is another one"
    hosts.second.close()
    assert await send(hosts.first, 0, label(0, 7)) == NOT_SENT
    hosts.second = host("b", tmp_path / "b")


@in_loop
async def test_a_slow_partner_does_not_keep_the_next_attempt_waiting(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(host="b", address="127.0.0.1", port=silent.getsockname()[1])
        monkeypatch.setattr(line, "IDLE_S", 0.3)
        await hosts.start(partners=(peer,))
        assert await send(hosts.first, 0, label(0, 5)) == NOT_SENT


@in_loop
async def test_bandwidth_is_limited_and_the_end_of_an_attempt_is_not_delayed(
    hosts: TwoHosts,
) -> None:
    await hosts.start(bytes_per_s=SLOT_BYTES // 10)  # ten seconds for a slot
    file = slot_of(hosts.first, 0)
    fill(file, label(0, 5))
    begun = time.monotonic()
    hosts.first.ready(CopyReady(attempt=1, rank=0, step=5, slot=0, copies=1))
    await asyncio.sleep(0.2)
    assert hosts.first.sending
    await begin(hosts.first, 0, CopyPlan(), attempt=2)
    assert not hosts.first.sending
    assert time.monotonic() - begun < 9
    assert mark_of(file) == SENDING, "what the next attempt finds is no answer to it"


@in_loop
async def test_a_partner_that_takes_nothing_does_not_delay_the_next_attempt(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has died, so that no connection breaks."""
    await hosts.start()
    let_go = threading.Event()
    monkeypatch.setattr(hosts.second.held, "begin", lambda *_: let_go.wait())
    fill(slot_of(hosts.first, 0), label(0, 5))
    hosts.first.ready(CopyReady(attempt=1, rank=0, step=5, slot=0, copies=1))
    await asyncio.sleep(0.3)
    assert hosts.first.sending
    begun = time.monotonic()
    await begin(hosts.first, 0, CopyPlan(), attempt=2)
    assert time.monotonic() - begun < line.IDLE_S / 2
    let_go.set()


@in_loop
async def test_a_partner_whose_copy_has_changed_is_named_and_another_one_asked(
    hosts: TwoHosts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await hosts.start()
    lying, honest, replaced = (host(name, tmp_path / name) for name in ("lying", "honest", "new"))
    try:
        peers = (await peer_of(lying), await peer_of(honest))
        for node, one in enumerate((lying, honest), 2):
            await begin(one, node, CopyPlan(holds=(0,)))
        await begin(hosts.first, 0, CopyPlan(partners=peers))
        assert await send(hosts.first, 0, label(0, 5), copies=2) == SENT
        held, _ = next(iter(lying.held.labels()))
        os.pwrite(held, b"\xff", SLOT_BYTES - 1000)
        await begin(replaced, 0, CopyPlan(wanted=(wanted(label(0, 5), *peers),)), attempt=2)
        assert read(slot_of(replaced, 0)) == (label(0, 5), content(0, 5))
        assert "from lying: the copy of rank 0 has changed since it was made" in caplog.text
        assert replaced.use().damaged == 1
    finally:
        for one in (lying, honest, replaced):
            one.close()


@in_loop
async def test_a_slot_of_another_number_of_ranks_is_fetched_beside_the_own_ones(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    await hosts.start()
    assert await send(hosts.second, 0, label(1, 5)) == SENT
    fill(slot_of(hosts.first, 0), label(0, 5))
    alone = host("c", tmp_path / "c")
    try:
        peer = await peer_of(hosts.first)
        plan = CopyPlan(wanted=(wanted(label(0, 5), peer), wanted(label(1, 5), peer)))
        start = replace(START, attempt=2, nodes=1, ranks_per_host=1, lineage=1, copies=plan)
        memory = await alone.prepare(start, plan)
        assert [Path(path).is_file() for path in memory.others] == [True, True]
        offered = await alone.offer(3)
        assert [steps(offered, rank) for rank in (0, 1)] == [[5], [5]]
        assert len(memory.slots[0]) == ALONE
        assert all(label_of(slot_of(alone, one)) is None for one in range(ALONE))
        # Two hosts again: rank 0's slot is of its own number of ranks.
        await begin(alone, 0, CopyPlan(), attempt=3)
        alone.slots.drop_others()
        assert alone.use().num_bytes == 0
    finally:
        alone.close()


@in_loop
async def test_a_damaged_or_missing_copy_is_passed_over_for_another_one(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    await hosts.start()
    assert await send(hosts.second, 0, label(1, 5)) == SENT
    good, gone = await peer_of(hosts.first), Peer(host="x", address="127.0.0.1", port=1)
    empty = host("c", tmp_path / "c")
    third = host("d", tmp_path / "d")
    try:
        plan = CopyPlan(wanted=(wanted(label(1, 5), gone, await peer_of(empty), good),))
        await begin(third, 1, plan, attempt=2)
        assert read(slot_of(third, 0))[1] == content(1, 5)
    finally:
        empty.close()
        third.close()


@in_loop
async def test_a_host_that_has_the_slot_itself_fetches_nothing(hosts: TwoHosts) -> None:
    await hosts.start()
    fill(slot_of(hosts.first, 1), label(0, 5))
    nowhere = Peer(host="x", address="127.0.0.1", port=1)
    await begin(hosts.first, 0, CopyPlan(wanted=(wanted(label(0, 5), nowhere),)), attempt=2)
    assert [label_of(slot_of(hosts.first, one)) for one in (0, 1)] == [None, label(0, 5)]


@in_loop
async def test_copies_of_former_partners_go_once_new_ones_are_everywhere(hosts: TwoHosts) -> None:
    await hosts.start()
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    # In the next attempt the second host keeps copies of rank 7 in place of rank 0.
    peer = await peer_of(hosts.second)
    await begin(hosts.second, 1, CopyPlan(holds=(7,)), attempt=2)
    await begin(hosts.first, 7, CopyPlan(partners=(peer,)), attempt=2)
    assert await send(hosts.first, 0, label(7, 6, attempt=2)) == SENT
    assert steps(await hosts.second.offer(3), rank=0) == [5], "it may be the only one"
    assert await send(hosts.first, 1, label(7, 7, attempt=2, shared=6)) == SENT
    assert steps(await hosts.second.offer(3), rank=0) == []


@in_loop
async def test_only_agents_of_the_job_and_its_launch_are_served(
    hosts: TwoHosts,
) -> None:
    await hosts.start()
    served = await peer_of(hosts.first)
    agent = hosts.second.where.claim
    with pytest.raises(Broken, match="not an agent of this job"):
        await asyncio.to_thread(connect, served.address, served.port, STRANGER, agent)
    for claim in (replace(agent, launch=2), replace(agent, purpose="agent")):
        with pytest.raises(OSError, match=r"(?i)clos|eof|reset|broken"):
            await asyncio.to_thread(_ask, served, claim)


def _ask(served: Peer, claim: Claim) -> None:
    found = connect(served.address, served.port, SECRET, claim)
    try:
        found.send(line.Request(kind="get", label=label(0, 1)))
        found.receive(line.Answer)
    finally:
        found.close()


@in_loop
async def test_strangers_do_not_shut_partners_out(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 3)
    await hosts.start()
    served = await peer_of(hosts.first)
    at = (served.address, served.port)
    silent = [socket.create_connection(at) for _ in range(4)]
    greeted = [await asyncio.to_thread(_greet, at) for _ in range(4)]
    await asyncio.to_thread(_ask, served, hosts.second.where.claim)
    assert await send(hosts.second, 0, label(1, 1)) == SENT
    for sock in (*silent, *greeted[:2]):  # the last ones are still welcome
        sock.settimeout(5)
        with pytest.raises(OSError, match=r"(?i)clos|eof|reset|broken"):
            _drained(sock)
    for sock in (*silent, *greeted):
        sock.close()


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(4_000, id="too slow"),
        pytest.param(65_536, id="too long"),
    ],
)
@in_loop
async def test_a_stranger_has_a_limit_in_time_and_size(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(line, "ENTER_S", 0.5)
    await hosts.start()
    served = await peer_of(hosts.first)
    sock = await asyncio.to_thread(_greet, (served.address, served.port))
    with sock, pytest.raises(OSError, match=r"(?i)clos|eof|reset|broken"):
        await asyncio.to_thread(_drip, sock, length)


def _drip(sock: socket.socket, length: int) -> None:
    """Send a message so slowly that only each byte comes in time."""
    sock.sendall(line.LENGTH.pack(length))
    for _ in range(40):
        time.sleep(0.05)
        sock.sendall(b" ")


def _greet(at: tuple[str, int]) -> socket.socket:
    """A connection of anybody who speaks TLS."""
    return client_context().wrap_socket(socket.create_connection(at))


def _drained(sock: socket.socket) -> None:
    while sock.recv(1 << 10):
        pass
    raise ConnectionError("closed")


@in_loop
async def test_a_copy_that_the_kernel_refuses_is_refused(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.start()

    def no_memory(file: int, begin: int, count: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(Refused, match="Cannot allocate memory"):
        hosts.second.held.begin(label(0, 5), SLOT_BYTES)
    assert hosts.second.held.num_bytes == 0


@in_loop
async def test_two_jobs_on_one_machine_do_not_see_each_others_slots(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    await hosts.start()
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    other = host("a", tmp_path / "other job", secret=STRANGER)
    try:
        plan = CopyPlan(wanted=(wanted(label(0, 5), await peer_of(hosts.second)),))
        await begin(other, 0, plan, attempt=2)
        assert label_of(slot_of(other, 0)) is None, "the other job's agent has another secret"
        assert (await other.offer(3)).slots == ()
        assert steps(await hosts.second.offer(2), rank=0) == [5]
    finally:
        other.close()


@in_loop
async def test_ranks_have_the_processors_first(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that send and take copies have a tenth of the weight of a rank, and the event loop
    keeps its own."""
    found: dict[str, set[tuple[int, int]]] = {"taken": set(), "sent": set()}

    def look(thread: str) -> None:
        priority = os.getpriority(os.PRIO_PROCESS, get_native_id())
        found[thread].add((priority, os.sched_getscheduler(0)))

    def taken(copies: HeldCopies, file: int, header_bytes: int) -> bool:
        look("taken")
        return commit(copies, file, header_bytes)

    def sent(file: int) -> Label | None:
        look("sent")
        return label_of(file)

    commit = HeldCopies.commit
    monkeypatch.setattr(HeldCopies, "commit", taken)
    monkeypatch.setattr(host_copies, "label_of", sent)
    own = os.getpriority(os.PRIO_PROCESS, get_native_id())
    await hosts.start()
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    given_way = {(max(own, NICE), os.SCHED_BATCH)}
    assert found == {"taken": given_way, "sent": given_way}
    assert os.getpriority(os.PRIO_PROCESS, get_native_id()) == own


@in_loop
async def test_a_wall_clock_that_jumps_changes_nothing(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.start(bytes_per_s=SLOT_BYTES * 4)
    clock, jumps = time.time, [0.0, 86_400.0, -86_400.0]
    monkeypatch.setattr(time, "time", lambda: clock() + jumps[int(clock() * 50) % 3])
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    copied_s = hosts.first.use().copied_s
    assert copied_s is not None
    assert 0 <= copied_s < 60


@in_loop
async def test_a_host_gives_its_copies_back_when_its_ranks_keep_nothing_any_more(
    hosts: TwoHosts,
) -> None:
    await hosts.start()
    assert await send(hosts.first, 0, label(0, 5)) == SENT
    hosts.second.ended(CopiesEnded(attempt=7, rank=2))
    assert hosts.second.use().held == 1, "it is of another attempt"
    hosts.second.ended(CopiesEnded(attempt=1, rank=2))
    while hosts.second.use().held:  # a thread may not have left the copy that it received
        await asyncio.sleep(0.001)
    assert hosts.second.held.num_bytes == 0
    assert await send(hosts.first, 1, label(0, 6)) == NOT_SENT
    assert hosts.second.held.num_bytes == 0


@in_loop
async def test_an_agent_without_memory_for_slots_starts_its_ranks_all_the_same(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file descriptor is in use, or Python knows no files in memory."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        memory = await begin(hosts.first, 0, CopyPlan())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (memory.slots, memory.why) == (
        (),
        "its agent has no memory for them: Too many open files",
    )
    monkeypatch.delattr(os, "memfd_create")
    memory = await begin(hosts.first, 0, CopyPlan())
    assert "without memfd_create" in memory.why
