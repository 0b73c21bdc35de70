"""Tables of facts about an attempt and the expected verdict."""

import itertools
import signal
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import (
    AgentLost,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HostStopped,
    RankEvidence,
    RankExited,
)
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.cause.diagnose import Weight, diagnose, weigh
from orchestrator.diagnosis.cause.exits import NOT_SAVED, signal_name
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit, Verdict
from orchestrator.diagnosis.logs.readings import End, read_exit
from tests.job.job_driver import GLOO_CLOSED, START, error, exited, found, raised
from tests.read_events import as_read

RESET = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error"
    " [127.0.0.1]:20878: Connection reset by peer. This is typically caused by a remote worker"
    " hanging or bugs in the application."
)
FROM_AGENTS = ("evidence", "stopped")
ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84]",
)


def verdict(*exits: RankExited, **more: Any) -> Verdict:
    return diagnose(findings(*exits, **more))


def findings(*exits: RankExited, own: tuple[FailureRule, ...] = (), **more: Any) -> Findings:
    heard: dict[str, Any] = {
        key: tuple(as_read(one, own) for one in more.pop(key, ())) for key in FROM_AGENTS
    }
    return Findings(
        opened_at=START, exits=tuple(as_read(one, own) for one in exits), **heard, **more
    )


def lost(name: str, at: float = START + 52, silent_s: float = 2.0) -> AgentLost:
    return AgentLost(at=at, host=name, why="it said nothing for 2.0 s", silent_s=silent_s)


def hang(behind: tuple[int, ...] = ()) -> HangDetected:
    return HangDetected(
        at=START + 60,
        attempt=1,
        phase="train",
        step=10,
        stalled_s=11.0,
        limit_s=10.0,
        behind=behind,
    )


def evidence(*ranks: RankEvidence) -> tuple[EvidenceGathered, ...]:
    """Evidence of hosts with two ranks each."""
    by_host = itertools.groupby(ranks, key=lambda rank: rank.rank // 2)
    return tuple(
        EvidenceGathered(at=START + 62, attempt=1, host=f"host-{n}", ranks=tuple(part))
        for n, part in by_host
    )


MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456]"
    " op.preamble.length <= op.nbytes. 16 vs 8. Received data size doesn't match expected size."
    " Is there a distributed collective mismatch in your code?",
)
"""The message that gloo writes in a drill `shape` before it aborts the process."""


def test_different_sizes_are_an_error_of_the_program() -> None:
    peers = (raised(0, RESET, at=START + 49.9), raised(1, GLOO_CLOSED, at=START + 50.2))
    said = verdict(exited(2, at=START + 50, signal=signal.SIGABRT, log_tail=MISMATCH), *peers)
    assert said.failure is not None
    assert (said.failure.name, said.failure.scope) == ("collective-mismatch", "user")
    assert said.kind == "rank-killed"


def test_a_save_on_a_full_disk_is_not_a_lost_peer() -> None:
    full = raised(
        2, "[enforce fail at inline_container.cc:659] . unexpected pos 704 vs 598", at=START + 50
    )
    said = verdict(raised(0, RESET, at=START + 49.9), full, raised(1, GLOO_CLOSED, at=START + 50.2))
    assert said.failure is not None
    assert (said.failure.name, said.culprit.rank) == ("disk-full", 2)


def test_a_save_that_failed_on_all_ranks_names_none() -> None:
    """The exception of each rank names the one that could not write, which need not be at fault:
    the disk is shared."""
    why = "the checkpoint of step 60 failed 4 times: rank 1: No space left on device: /r/x"
    full = raised(0, why, at=START + 50, kind=NOT_SAVED)
    said = verdict(full, raised(1, why, at=START + 50.1, kind=NOT_SAVED))
    assert said.failure is not None
    assert (said.failure.name, said.culprit) == ("disk-full", NOBODY)
    assert said.cause.startswith(f"all ranks failed alike: {NOT_SAVED}: {why}")


def test_an_exception_without_a_message_has_no_colon() -> None:
    said = verdict(raised(1, "", at=START + 50, kind="AssertionError"))
    assert said.cause == "rank 1 raised AssertionError at step 10"
    assert said.signature == "AssertionError at step 10"


def test_a_very_long_message_does_not_hide_the_end_of_the_cause() -> None:
    said = verdict(raised(1, "a" * 2_000 + "z", at=START + 50, kind="RuntimeError"))
    assert said.cause.startswith("rank 1 raised RuntimeError: aaa")
    assert said.cause.endswith("aaaz at step 10")
    assert len(said.cause) < 500
    other = verdict(raised(1, "a" * 1_000 + "b" + "a" * 999 + "z", at=START + 50))
    assert other.signature != said.signature, "the whole message tells two errors apart"
    fixed = verdict(raised(1, "a" * 2_000 + "\n  fix: " + "b" * 50, at=START + 50))
    assert "\n  fix: " + "b" * 50 in fixed.cause


KILLED = exited(1, at=START + 50)
PEERS = (
    raised(0, RESET, at=START + 49.9),  # clocks of hosts differ
    raised(2, GLOO_CLOSED, at=START + 50.1),
    exited(3, at=START + 50.2, signal=signal.SIGABRT, log_tail=ABORTED),
)


@pytest.mark.parametrize("order", list(itertools.permutations((KILLED, *PEERS))))
def test_a_killed_rank_is_found_among_peers_with_more_messages(
    order: tuple[RankExited, ...],
) -> None:
    said = verdict(*order)
    assert (said.kind, str(said.culprit)) == ("rank-killed", "rank 1 on host-0")
    assert said.cause == "rank 1 was killed by SIGKILL"
    assert (said.evidence.signal, said.at, said.signature) == ("SIGKILL", START + 50, "")


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
def test_an_exception_is_the_cause_of_aborts_elsewhere(order: tuple[int, ...]) -> None:
    signs = (
        raised(2, "shapes differ", at=START + 51),
        exited(0, signal=signal.SIGABRT, log_tail=ABORTED),
        exited(3, signal=signal.SIGTERM),
    )
    said = verdict(*(signs[n] for n in order))
    assert (said.kind, said.culprit.rank) == ("exception", 2)
    assert said.cause == "rank 2 raised RuntimeError: shapes differ at step 10"
    assert said.signature == "RuntimeError: shapes differ at step 10"
    assert "shapes differ" in said.evidence.traceback


def test_the_earlier_of_two_causes_is_the_cause() -> None:
    late, early = raised(0, "late", at=START + 9), raised(3, "early", at=START + 8)
    assert verdict(late, early).culprit.rank == 3


def test_a_kill_comes_before_an_exception_of_no_known_kind_on_another_host() -> None:
    """A library may tell of a lost peer in words of its own."""
    wrapped = raised(2, "stage 1 could not run its schedule", at=START + 49.5)
    said = verdict(wrapped, KILLED, raised(3, GLOO_CLOSED, at=START + 50.3))
    assert (said.kind, str(said.culprit)) == ("rank-killed", "rank 1 on host-0")


@pytest.mark.parametrize(
    "other",
    [
        # The watcher of the same host reports ends in the order in which they happened.
        exited(3, at=START + 50.1),
        exited(1, at=START + 53.1),  # too late to belong together
        exited(1, at=START + 50.1, signal=signal.SIGSEGV),  # may crash because its peer is gone
    ],
    ids=["same host", "later", "crash"],
)
def test_the_exception_is_the_cause_of_other_ends(other: RankExited) -> None:
    said = verdict(raised(2, "shapes differ", at=START + 50), other)
    assert (said.kind, said.culprit.rank) == ("exception", 2)


SYMPTOMS = [
    GLOO_CLOSED,
    RESET,
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection refused [10.0.0.2]:4321",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with [..] Connect timeout [::1]:52131",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"
    " for recv operation to complete",
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process"
    " exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed"
    " possibly due to a network error or a remote process exiting prematurely.",
    "NCCL error in: NCCLUtils.hpp:317, unhandled system error, NCCL version 2.21.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nsocketProgress: Connection closed by remote peer node-3<43210>",
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nsocketStartConnect: Connect to 10.0.0.9<43211> failed : No route to host",
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nsocketPollConnect: connect returned Connection timed out, exceeded retries (35)",
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1",
    "NCCL communicator was aborted on rank 5. Original reason for failure was: timeout",
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE,"
    " NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "[c10d] recvValue failed on SocketImpl(fd=75, addr=[localhost]:41270, remote=[localhost]:29500)"
    ": failed to recv, got 0 bytes. Connection was likely closed.",
    "[c10d] sendBytes failed on SocketImpl(fd=3, addr=[a]:1, remote=[b]:2): Broken pipe",
    "wait timeout after 300000ms, keys: /default_pg/0//worker/0",
    "The client socket has timed out after 60000ms while trying to connect to (host-0, 29500).",
    "Socket Timeout",
]
CAUSES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "DataLoader worker (pid 1234) is killed by signal: Killed.",
    "[Errno 28] No space left on device: 'checkpoints/step-40'",
    "The size of tensor a (8) must match the size of tensor b (7) at non-singleton dimension 1",
]


def aborted(message: str) -> RankExited:
    """The last lines of a C++ program with an uncaught exception."""
    thrown = "terminate called after throwing an instance of 'std::runtime_error'"
    tail = ("before", thrown, *f"  what():  {message}".splitlines())
    return exited(0, signal=signal.SIGABRT, log_tail=tail)


@pytest.mark.parametrize("message", SYMPTOMS)
def test_messages_of_peers_about_a_lost_rank_are_symptoms(message: str) -> None:
    assert weigh(raised(0, message)) is Weight.SYMPTOM
    assert weigh(aborted(message)) is Weight.SYMPTOM


@pytest.mark.parametrize("message", CAUSES)
def test_a_crash_of_the_rank_itself_is_a_cause(message: str) -> None:
    assert weigh(raised(0, message)) is Weight.CAUSE
    assert weigh(aborted(message)) is Weight.CAUSE


SERVICE = (
    "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x"
    " (Caused by NewConnectionError('<urllib3.connection.HTTPSConnection object at 0x7f>: Failed to"
    " establish a new connection: [Errno 111] Connection refused'))"
)


@pytest.mark.parametrize(
    ("kind", "message", "name"),
    [
        ("requests.exceptions.ConnectionError", SERVICE, "service-unreachable"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "service-unreachable"),
        (
            "CheckpointException",
            "CheckpointException ranks:dict_keys([2])\nTraceback (most recent call last): (RANK 2)"
            "\nConnectionResetError: [Errno 104] Connection reset by peer",
            "service-unreachable",
        ),
        ("BrokenPipeError", "[Errno 32] Broken pipe", "python-exception"),
    ],
)
def test_a_failed_connection_to_something_other_than_a_peer_is_a_cause(
    kind: str, message: str, name: str
) -> None:
    mine = exited(2, at=START + 50, error=replace(error(message), error=kind))
    said = verdict(raised(0, RESET, at=START + 49.9), mine, raised(1, GLOO_CLOSED, at=START + 50.1))
    assert said.failure is not None
    assert (said.failure.name, said.culprit.rank) == (name, 2)


def test_a_service_that_several_hosts_cannot_reach_has_no_culprit() -> None:
    exits = (raised(0, SERVICE), raised(2, SERVICE, at=START + 50.5))
    said = verdict(*exits)
    assert (said.kind, said.culprit) == ("exception", NOBODY)
    assert said.cause.startswith("2 hosts had service-unreachable at once: host-0, host-1")
    assert verdict(exits[0]).culprit.host == "host-0"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (("start", "fatal: the vocabulary file is empty"), "fatal: the vocabulary file is empty"),
        (
            (
                "Exception in thread Thread-1 (f):",
                "Traceback (most recent call last):",
                "RuntimeError: shard 12 is odd",
                "[rank1]:[W1201 10:00:00.1 x.cpp:1] Warning: failed to destroy the group",
            ),
            "RuntimeError: shard 12 is odd",
        ),
        (("step 41  loss 3.218", "0 errors"), ""),
    ],
)
def test_the_cause_of_an_exit_without_an_exception_has_the_last_error_of_the_log(
    log: tuple[str, ...], error: str
) -> None:
    cause = verdict(exited(1, exit_code=1, log_tail=log)).cause
    assert cause == "rank 1 exited with code 1" + (f"; its last error: {error}" if error else "")


def test_a_neighbour_that_torchrun_ends_does_not_explain_a_lost_connection() -> None:
    """The end of the neighbour may be noticed before the exit that made torchrun end it."""
    ended = exited(0, at=START + 49.9, signal=signal.SIGTERM)
    closed = "NCCL WARN Connection closed by remote peer node5<43210>"
    left = exited(1, exit_code=1, log_tail=(closed,))
    said = verdict(ended, left)
    assert said.cause.endswith("(first: rank 1 exited with code 1)")
    assert said.failure is not None
    assert said.failure.name == "nccl-remote-error"
    # A rank of another host was not ended by that torchrun.
    other = verdict(ended, replace(left, rank=2, host="host-1"))
    assert other.cause.endswith("(first: rank 0 was killed by SIGTERM)")


def test_symptoms_alone_have_no_culprit() -> None:
    said = verdict(*PEERS, exited(1, signal=signal.SIGTERM))
    assert (said.kind, said.culprit, said.signature) == ("connection-lost", NOBODY, "")
    assert said.cause.startswith("ranks lost their connections; which one broke is not known")
    assert said.at == START + 49.9
    assert str(said.culprit) == "nobody"


UNREACHABLE = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
    "Last error:\nsocketStartConnect: Connect to {}<43211> failed : No route to host"
)


def test_unreachable_addresses_are_reported_without_a_culprit() -> None:
    exits = (
        *(raised(rank, UNREACHABLE.format("10.0.0.9"), at=START + 50 + rank) for rank in (0, 1)),
        raised(2, UNREACHABLE.format("10.1.0.7")),
        raised(3, GLOO_CLOSED),
    )
    findings = Findings(opened_at=START, exits=exits)
    said = diagnose(findings, addresses={"10.0.0.9": "host-4"})
    assert (said.kind, said.culprit) == ("connection-lost", NOBODY)
    assert said.failure is not None
    assert said.failure.name == "peer-unreachable"
    assert said.evidence.notes[-2:] == (
        "2 ranks could not connect to 10.0.0.9, which is host-4",
        "1 rank could not connect to 10.1.0.7",
    )


def test_an_infiniband_error_keeps_its_class_and_names_the_unreachable_peer() -> None:
    told = (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
        " prematurely.\nNET/IB: Got completion from peer 10.0.0.9<51234> with status=12 opcode=0"
    )
    exits = tuple(raised(rank, told, at=START + 50 + rank) for rank in (0, 1))
    said = diagnose(Findings(opened_at=START, exits=exits), addresses={"10.0.0.9": "host-4"})
    assert (said.kind, said.culprit) == ("connection-lost", NOBODY)
    assert said.failure is not None
    assert (said.failure.name, said.failure.scope) == ("infiniband-error", "fabric")
    assert said.evidence.notes[-1] == (
        "2 ranks had an InfiniBand error towards 10.0.0.9, which is host-4"
    )


RACK = {f"host-{n}": ("spine-0", f"leaf-{n // 4}") for n in range(16)}


def test_hosts_lost_at_the_same_moment_are_no_culprits() -> None:
    gone = tuple(lost(f"host-{n}", at=START + 52 + 0.1 * n) for n in range(4, 8))
    said = diagnose(Findings(opened_at=START, lost=gone), switches=RACK)
    assert (said.kind, said.culprit) == ("hosts-lost", NOBODY)
    assert said.cause.startswith(
        "4 hosts were lost at once: host-4, host-5, host-6, host-7, all below leaf-1 (first: the"
        " agent of host-4 is gone"
    )
    assert said.failure is not None
    assert (said.failure.name, said.failure.scope) == ("hosts-lost", "fabric")
    wider = diagnose(Findings(opened_at=START, lost=(*gone, lost("host-9"))), switches=RACK)
    assert "all below spine-0" in wider.cause
    many = tuple(lost(f"host-{n}") for n in range(12))
    assert (
        "host-5 and 4 more, all below spine-0"
        in diagnose(Findings(opened_at=START, lost=many), switches=RACK).cause
    )
    assert "all below" not in diagnose(Findings(opened_at=START, lost=many)).cause


def cut_off(host: str, since: float = START + 40, at: float = START + 66) -> HostStopped:
    """An agent that stopped its ranks because it lost the leader, and is connected again."""
    return HostStopped(at=at, attempt=1, host=host, finished=False, alone_s=at - since)


def test_hosts_cut_off_from_a_live_leader_have_no_culprit() -> None:
    """Neither these hosts nor hosts of ranks that lost their peers meanwhile are the culprit."""
    told = (cut_off("host-5"), cut_off("host-2"), cut_off("host-5"))
    said = verdict(*PEERS, stopped=told, lost=(lost("host-5", at=START + 51),))
    assert (said.kind, said.culprit) == ("cut-off", NOBODY)
    assert said.cause.startswith(
        "the leader and host-2, host-5 did not hear each other for 26.0 s, so ranks were stopped"
    )
    assert (said.at, said.detected_after_s) == (START + 40, 26.0)
    assert said.failure is not None
    assert (said.failure.name, said.failure.scope) == ("cut-off", "fabric")


def test_a_host_that_fell_silent_with_a_cut_off_agent_is_no_culprit() -> None:
    """Both were cut off, and one of them is heard again. Found by the simulation."""
    silent = lost("host-2", at=START + 50, silent_s=10.5)
    said = verdict(*PEERS, stopped=(cut_off("host-5"),), lost=(silent,))
    assert (said.kind, said.culprit) == ("cut-off", NOBODY)
    assert said.cause.endswith(
        "they hear each other again; host-2 fell silent with them and did not come back"
    )
    long_before = replace(silent, silent_s=20.0)
    said = verdict(*PEERS, stopped=(cut_off("host-5"),), lost=(long_before,))
    assert said.culprit.host == "host-2"
    taken = replace(silent, taken="preempted")
    said = verdict(*PEERS, stopped=(cut_off("host-5"),), lost=(taken,))
    assert said.culprit.host == "host-2", "its loss is explained, and has no incident"


def test_a_host_that_was_lost_while_the_job_left_shares_the_blame_and_bears_none() -> None:
    one, other = lost("host-5", silent_s=3.0), lost("host-2", silent_s=4.0)
    said = verdict(lost=(one,), left=(other,))
    assert (said.kind, said.culprit) == ("hosts-lost", NOBODY)
    assert said.cause.startswith("2 hosts were lost at once: host-2, host-5")
    assert verdict(lost=(one,), left=(replace(other, silent_s=9.0),)).culprit.host == "host-5"
    assert verdict(KILLED, left=(other,)).culprit.rank == KILLED.rank


def test_an_earlier_failure_is_the_cause_even_if_agents_are_cut_off_later() -> None:
    assert verdict(KILLED, stopped=(cut_off("host-5", since=START + 55),)).kind == "rank-killed"


def test_a_rank_that_failed_by_itself_is_the_cause_although_agents_were_cut_off_before() -> None:
    """The leader was suspended, so it hears of both at once and does not know which came first. But
    a cut-off agent ends no rank until it stops its own, and then peers only lose connections.
    """
    failed = raised(1, "CUDA out of memory", kind="OutOfMemoryError", at=START + 66)
    said = verdict(failed, *PEERS, stopped=(cut_off("host-5", since=START + 40),))
    assert (said.kind, said.culprit.rank) == ("exception", 1)
    silent = replace(lost("host-5", at=START + 60, silent_s=20.0), cut_off_s=27.0)
    assert verdict(failed, lost=(silent,)).culprit.rank == 1


def test_a_host_lost_while_the_leader_was_cut_off_is_no_culprit() -> None:
    said = verdict(lost=(replace(lost("host-5"), cut_off_s=27.0),))
    assert (said.kind, said.culprit) == ("cut-off", NOBODY)
    assert "for 27.0 s the leader heard neither the scheduler nor host-5" in said.cause


def test_a_host_that_fell_silent_with_one_of_a_known_cut_is_no_culprit_either() -> None:
    """The leader reported host-5 before it noticed that it was cut off. Found by the simulation."""
    cut = replace(lost("host-6", at=START + 301, silent_s=10.8), cut_off_s=272.0)
    before = lost("host-5", at=START + 300, silent_s=10.1)
    said = verdict(lost=(before, cut))
    assert (said.kind, said.culprit) == ("cut-off", NOBODY)
    long_before = lost("host-5", at=START + 290, silent_s=10.1)
    assert verdict(lost=(long_before, cut)).culprit.host == "host-5"


def test_hosts_lost_one_after_the_other_are_separate_failures() -> None:
    said = verdict(lost=(lost("host-5"), lost("host-6", at=START + 60)))
    assert (said.kind, said.culprit.host) == ("host-lost", "host-5")


def test_hosts_lost_one_after_the_other_while_no_rank_runs_are_no_culprits() -> None:
    """Seed 100127 of the simulation: every network connection loses messages during the check of
    all hosts, and agents are lost and come back for 50 s. host-2 is only the first of them."""
    heard = {"host-2": 103.3, "host-0": 108.1, "host-4": 109.1, "host-1": 108.9, "host-6": 151.4}
    gone = tuple(lost(name, at=START + at + 2.5, silent_s=2.5) for name, at in heard.items())
    said = verdict(lost=gone, idle=True)
    assert (said.kind, said.culprit) == ("hosts-lost", NOBODY)
    assert said.cause.startswith(
        "5 hosts were lost within 48 s: host-0, host-1, host-2, host-4, host-6 (first: the agent of"
        " host-2 is gone"
    )
    assert verdict(lost=gone[:1], idle=True).culprit.host == "host-2"


def test_a_host_taken_by_the_scheduler_is_the_cause_even_if_others_follow() -> None:
    evicted = replace(lost("host-5"), taken="evicted for want of memory")
    said = verdict(lost=(evicted, lost("host-6")))
    assert (said.kind, said.culprit.host) == ("host-lost", "host-5")


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"


def test_the_same_hardware_error_on_several_hosts_has_no_culprit() -> None:
    """For example, all hosts have the same wrong setting."""
    said = verdict(raised(0, BUSY), raised(2, BUSY, at=START + 50.5), raised(3, GLOO_CLOSED))
    assert (said.kind, said.culprit) == ("exception", NOBODY)
    assert said.cause.startswith("2 hosts had gpu-busy at once: host-0, host-1 (first: rank 0")
    cut_off = verdict(raised(0, BUSY), raised(1, BUSY), raised(2, GLOO_CLOSED))
    assert cut_off.culprit == Culprit(host="host-0", rank=0)


def test_ranks_that_vanish_with_their_launcher_are_the_cause() -> None:
    gone = [exited(n, at=START + 51, signal=None, exit_code=None) for n in (2, 3)]
    said = verdict(*PEERS[:1], *gone)
    assert (said.kind, str(said.culprit)) == ("rank-lost", "rank 2 on host-1")
    assert said.cause == "rank 2 vanished together with its keeper"
    assert verdict(*gone, KILLED).kind == "rank-killed"


def test_a_lost_agent_is_the_cause_of_symptoms() -> None:
    said = verdict(*PEERS, lost=(lost("host-1"),))
    assert (said.kind, str(said.culprit)) == ("host-lost", "host-1")
    assert (said.at, said.detected_after_s) == (START + 50, 2.0)
    assert said.cause == "the agent of host-1 is gone: it said nothing for 2.0 s"


def test_a_rank_killed_before_its_agent_is_the_cause() -> None:
    assert verdict(exited(2, at=START + 40), lost=(lost("host-1"),)).kind == "rank-killed"


def test_exits_caused_by_stopping_are_never_the_cause() -> None:
    ours = [exited(n, at=START, stopped=True, exit_code=exit_codes.CHECKPOINTED) for n in (0, 1, 2)]
    assert verdict(*ours, exited(3, at=START + 60)).culprit.rank == 3
    assert verdict(*ours, hang=hang()).kind == "hang"
    assert verdict(*ours).kind == "launch-failed"


TORCHRUN = """torchrun ended with code 1
  File "multiprocessing/synchronize.py", line 57, in __init__
    sl = self._semlock = _multiprocessing.SemLock(
                         ^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 28] No space left on device
"""
STORE = """torchrun ended with code 1
Traceback (most recent call last):
torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients.
"""


@pytest.mark.parametrize(
    ("why", "cause", "name"),
    [
        (TORCHRUN, "code 1: OSError: [Errno 28] No space left on device", "shared-memory"),
        (STORE, STORE.splitlines()[-1], "launch-failed"),
        ("torchrun ended with code -9\n", "torchrun ended with code -9", "launch-failed"),
        ("", "it ended without a message", "launch-failed"),
    ],
)
def test_torchruns_last_error_is_the_cause_with_its_class(why: str, cause: str, name: str) -> None:
    stopped = (
        HostStopped(at=START, host="host-0", attempt=1, finished=True),
        HostStopped(at=START, host="host-1", attempt=1, finished=False, why=why),
    )
    said = verdict(stopped=stopped)
    assert (said.kind, str(said.culprit)) == ("launch-failed", "host-1")
    assert said.cause.startswith("torchrun failed on host-1: ")
    assert said.cause.endswith(cause)
    assert len(said.cause.splitlines()) == 1
    assert said.failure is not None
    assert said.failure.name == name


def test_a_host_that_cannot_stop_is_the_culprit_only_if_nothing_else_is_known() -> None:
    stuck = (lost("host-1", silent_s=0.0),)
    assert verdict(KILLED, stuck=stuck).kind == "rank-killed"
    assert verdict(hang=hang(), stuck=stuck).kind == "hang"
    assert str(verdict(*PEERS, stuck=stuck).culprit) == "host-1"


def test_a_rank_that_received_a_signal_from_outside_is_named() -> None:
    said = verdict(exited(2, exit_code=exit_codes.CHECKPOINTED))
    assert (said.kind, said.final) == ("rank-stopped", False)
    assert "got a signal from outside" in said.cause


def test_a_plain_exit_code_is_reported() -> None:
    said = verdict(exited(2, exit_code=1))
    assert (said.kind, said.cause) == ("rank-exited", "rank 2 exited with code 1")
    assert said.evidence.exit_code == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"error": error("bad tp: broken pipe stages")}, "bad tp: broken pipe stages"),
        ({"log_tail": ("first", "error: bad tp")}, "error: bad tp"),
        ({}, "see its log"),
    ],
)
def test_a_refused_configuration_is_final_with_any_message(
    more: dict[str, Any], words: str
) -> None:
    said = verdict(exited(0, exit_code=exit_codes.REFUSED, **more))
    assert (said.kind, said.final) == ("refused", True)
    assert said.cause == f"the trainer refused its configuration: {words}"


def test_a_full_disk_at_the_start_is_no_mistake_of_the_configuration() -> None:
    full = "failed to write /r/train.tokens: No space left on device (0.0 of 3.0 MiB free)"
    raised_error = error(f"{full}\n  fix: free space in /r")
    reading = read_exit(End(exit_code=exit_codes.REFUSED, signal=None, error=raised_error))
    said = verdict(exited(0, exit_code=exit_codes.REFUSED, error=raised_error, reading=reading))
    assert said.failure is not None
    assert (said.kind, said.failure.name, said.failure.scope) == (
        "disk-full",
        "disk-full",
        "storage",
    )
    assert (said.culprit, said.final) == (NOBODY, True)  # all ranks raise what the first one met
    assert (said.cause, said.fix) == (f"the disk is full: {full}", "free space in /r")


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (11, "SIGSEGV"), (99, "signal 99"), (None, None)],
)
def test_signals_have_names(number: int | None, name: str | None) -> None:
    assert signal_name(number) == name


def test_a_launch_that_fails_without_a_message_names_its_host() -> None:
    stops = tuple(
        HostStopped(at=START, attempt=1, host=f"host-{n}", finished=n == 0, why="x" * n)
        for n in range(3)
    )
    said = verdict(stopped=stops)
    assert (said.culprit.host, said.cause) == ("host-1", "torchrun failed on host-1: x")
    assert verdict().cause == "torchrun failed on an unknown host: it ended without a message"


# Hangs

LEVEL = tuple(found(rank) for rank in range(4))


def seen(*odd: RankEvidence, only: int = 4) -> tuple[EvidenceGathered, ...]:
    by_rank = {rank.rank: rank for rank in (*LEVEL[:only], *odd)}
    return evidence(*(by_rank[number] for number in sorted(by_rank)))


@pytest.mark.parametrize(
    ("ranks", "rank", "how"),
    [
        (seen(found(2, process_state="T", stack=())), 2, "stopped by a signal (state T)"),
        (seen(found(1, process_state="D")), 1, "uninterruptible wait"),
        (seen(found(1, process_state="gone", stack=())), 1, "is gone"),
        (seen(found(3, stack=())), None, "gave no stack when asked, but"),
        (seen(*(found(n, process_state="T") for n in (2, 3))), 2, "stopped by a signal"),
        (seen(found(3, step=9)), None, "rank 3 reported fewer steps than the others, but"),
        (seen(), None, "not-known"),
        (seen(*(found(n, process_state="T") for n in (0, 3))), None, "not-known"),
        (seen(found(0, stack=()), only=1), None, "not-known"),
        ((), None, "no dump and no stack was found"),
    ],
)
def test_without_dumps_only_a_certain_sign_names_a_host(
    ranks: tuple[EvidenceGathered, ...], rank: int | None, how: str
) -> None:
    said = verdict(hang=hang(), evidence=ranks)
    assert said.kind == "hang"
    assert said.culprit.rank == rank
    assert said.culprit.host == (None if rank is None else f"host-{rank // 2}")
    assert how in said.cause


def hang_judged(**more: Any) -> HangJudged:
    values: dict[str, Any] = {
        "at": START + 63,
        "attempt": 1,
        "verdict": "never-entered",
        "cause": "rank 3 did not call the operation in which the others wait",
        "scope": "rank",
        "ranks": (3,),
        "hosts": ("host-1",),
        "confidence": 0.95,
    }
    return HangJudged(**values | more)


def test_the_verdict_from_dumps_has_priority_over_the_journal() -> None:
    stopped = seen(found(0, process_state="T", stack=()))
    said = verdict(hang=hang(), evidence=stopped, judged=hang_judged(waiting=("op 7 of mesh_tp",)))
    assert said.culprit == Culprit(host="host-1", rank=3)
    assert said.confidence == 0.95
    assert "rank 3 did not call" in said.cause
    assert "waiting: op 7 of mesh_tp" in said.evidence.notes


def test_a_sure_verdict_without_a_host_says_why_nobody_is_named() -> None:
    said = verdict(hang=hang(), judged=hang_judged(hosts=()))
    assert said.culprit == NOBODY
    assert said.cause.endswith(
        "but this does not show that its host is at fault, so no culprit is named"
    )
    unsure = verdict(hang=hang(), judged=hang_judged(hosts=(), confidence=0.5))
    assert unsure.cause.endswith("but that is not sure enough to name a culprit")


def test_an_error_of_the_program_excludes_no_host_and_has_a_signature() -> None:
    program = {"verdict": "mismatch", "scope": "user", "hosts": ()}
    said = verdict(hang=hang(), judged=hang_judged(**program))
    assert said.culprit == Culprit(rank=3)
    assert str(said.culprit) == "rank 3, but no host"
    assert said.signature == "mismatch of rank 3 at step 10"
    unsure = verdict(hang=hang(), judged=hang_judged(**program, confidence=0.5))
    assert (unsure.culprit, unsure.signature) == (NOBODY, "")


def test_a_timed_out_collective_is_a_hang_with_its_verdict() -> None:
    watchdog = exited(
        1,
        at=START + 50,
        exit_code=None,
        signal=6,
        log_tail=("[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",),
    )
    said = verdict(watchdog, judge_by=START + 90, judged=hang_judged())
    assert (said.kind, said.culprit.rank) == ("hang", 3)
    assert said.cause.startswith("a collective of rank 1 timed out; never-entered (95% sure)")
    assert verdict(watchdog).kind == "connection-lost", "nobody looked"
    killed = exited(2, at=START + 60)
    assert (
        verdict(watchdog, killed, judge_by=START + 90, judged=hang_judged()).kind == "rank-killed"
    )


GLOO_WAITED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"
    " waiting 1800000ms for recv operation to complete"
)
WATCHDOG_LINE = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)


def test_a_hang_reported_by_a_watchdog_starts_with_its_collective() -> None:
    watchdog = exited(1, at=START + 900, exit_code=None, signal=6, log_tail=(WATCHDOG_LINE,))
    said = verdict(watchdog, judge_by=START + 990, judged=hang_judged())
    assert (said.at, said.detected_after_s) == (START + 900 - 600.01, 600.01)
    assert said.cause.startswith("a collective of rank 1 timed out after 600 s; never-entered")
    gloo = raised(1, GLOO_WAITED, at=START + 2000)
    assert verdict(gloo, judge_by=START + 2010, judged=hang_judged()).at == START + 200


def test_a_watchdog_timeout_with_a_known_cause_has_the_class_of_hangs() -> None:
    watchdog = exited(1, exit_code=None, signal=6, log_tail=(WATCHDOG_LINE,))
    said = verdict(watchdog, judge_by=START + 90, judged=hang_judged())
    assert said.failure is not None
    assert said.failure.name == "hang"
    assert f"rank 1 said: {WATCHDOG_LINE}" in said.evidence.notes
    assert not any("nccl-watchdog" in note for note in said.evidence.notes)
    unsure = verdict(watchdog, judge_by=START + 90, judged=hang_judged(hosts=(), confidence=0.5))
    assert unsure.failure is not None
    assert unsure.failure.name == "nccl-watchdog-timeout"


def test_a_users_class_for_watchdog_messages_is_kept() -> None:
    own = FailureRule(name="ours", scope="fabric", action="requeue", patterns=("Watchdog caught",))
    watchdog = exited(1, exit_code=None, signal=6, log_tail=(WATCHDOG_LINE,))
    told = findings(watchdog, own=(own,), judge_by=START + 90, judged=hang_judged())
    said = diagnose(told, (own,))
    assert said.failure is not None
    assert (said.failure.name, said.failure.own) == ("ours", True)


def test_a_hang_event_keeps_stacks_and_names_missing_ones() -> None:
    said = verdict(hang=hang(), evidence=seen(found(1, stack=()), found(2, stack=())))
    assert said.evidence.stacks["0"] == ("all_reduce",)
    assert said.evidence.stacks["1"] == ()
    assert "not-known" in said.cause
    assert (said.at, said.detected_after_s) == (START + 49, 11.0)


def test_a_rank_that_dies_during_diagnosis_outweighs_the_hang() -> None:
    assert verdict(raised(2, GLOO_CLOSED), hang=hang()).kind == "hang"
    assert verdict(raised(2, "shapes differ"), hang=hang()).kind == "exception"
    assert verdict(hang=hang(), lost=(lost("host-1"),)).kind == "host-lost"


def test_a_lost_leader_is_the_cause_only_if_nothing_else_explains_it() -> None:
    gone: dict[str, Any] = {"leader_lost": START + 90, "noticed_at": START + 100}
    said = verdict(**gone)
    assert (said.kind, said.culprit, said.at) == ("leader-lost", NOBODY, START + 90)
    assert said.detected_after_s == 10.0
    assert verdict(**gone, leader_host="host-0").culprit == Culprit(host="host-0")
    assert verdict(**gone, leader_host="host-0", leader_host_works=True).culprit == NOBODY
    assert verdict(*PEERS, **gone).kind == "leader-lost"
    assert verdict(KILLED, **gone).kind == "rank-killed"
    assert verdict(hang=hang(), **gone).kind == "hang"


def test_a_verdict_has_a_failure_class_and_advice() -> None:
    lines = ("OSError: [Errno 28] No space left on device",)
    said = verdict(exited(1, at=START + 50, exit_code=1, signal=None, log_tail=lines))
    assert said.failure is not None
    assert (said.failure.name, said.failure.scope) == ("disk-full", "storage")
    assert said.evidence.notes[0].startswith("class disk-full (scope storage): free disk space")


STEP = "2026-11-22 16:00:02,000 step 31/60 loss 3.1000 grad_norm 1 lr 1.00e-04 tokens/s 100"
TORN = (
    "not using checkpoint step-40: model-0.safetensors has another checksum than its marker says",
    STEP,
)
FULL = (
    "failed to save the checkpoint of step 40: OSError: [Errno 28] No space left on device",
    STEP,
)
MAPPED = "RuntimeError: [Errno 12] Cannot allocate memory"
SIGTERM_REPORTED = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-06-18T13:05:36 DUE TO PREEMPTION ***"
)
DENIED = ("PermissionError: [Errno 13] Permission denied: '/x'",)
READ_ERROR = (
    "failed to save the checkpoint of step 40: OSError: [Errno 5] Input/output error",
    STEP,
)


@pytest.mark.parametrize(
    ("tail", "how", "name"),
    [
        (TORN, {"signal": 9}, "sigkill-from-outside"),
        (FULL, {"signal": 9}, "sigkill-from-outside"),
        (FULL, {"signal": 6}, "abort"),
        (FULL, {"signal": 11}, "segfault"),
        (FULL, {"signal": 7}, "segfault"),
        (READ_ERROR, {"signal": 6}, "abort"),
        (DENIED, {"signal": 15}, "scheduler-sigterm"),
        (FULL, {"exit_code": exit_codes.CHECKPOINTED}, "scheduler-sigterm"),
        (FULL, {"signal": None, "exit_code": None}, "unknown"),
        ((MAPPED,), {"signal": 9}, "host-out-of-memory"),
        ((SIGTERM_REPORTED,), {"signal": 9}, "scheduler-sigterm"),
        (MISMATCH, {"signal": 6}, "collective-mismatch"),
        (
            (
                "[rank2]:[E626 23:10:17.921 ProcessGroupNCCL.cpp:1896] [PG ID 2 PG GUID 3 Rank 2]"
                " Process group watchdog thread terminated with exception: CUDA error: an illegal"
                " memory access was encountered",
            ),
            {"signal": 6},
            "illegal-memory-access",
        ),
        (
            (*FULL, "terminate called after throwing 'c10::Error'", "what(): CUDA out of memory"),
            {"signal": 6},
            "cuda-out-of-memory",
        ),
        (FULL, {"exit_code": 1}, "disk-full"),
    ],
)
def test_an_old_warning_is_not_why_a_signal_ended_a_rank(
    tail: tuple[str, ...], how: dict[str, Any], name: str
) -> None:
    said = verdict(exited(0, log_tail=tail, **how))
    assert said.failure is not None
    assert said.failure.name == name


RETRIED_CONNECTION = (
    "[W1123 02:21:40.192837465 socket.cpp:767] [c10d] The client socket has failed to connect to"
    " [localhost]:29500 (errno: 99 - Cannot assign requested address)."
)
RETRIED_NAME = (
    "[W socket.cpp:601] [c10d] The IPv6 network addresses of (user, 53821) cannot be retrieved"
    " (gai error: -3 - Temporary failure in name resolution)."
)
PORT_RECOVERED = "NCCL WARN NET/IB : Got async event : port error"
RAISED = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "KeyError: 'input_ids'",
)
CAUSED = (
    "Traceback (most recent call last):",
    "OSError: [Errno 28] No space left on device",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    *RAISED,
)
IGNORED = (
    "Exception ignored in: <function Store.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    "RuntimeError: Broken pipe",
)
OF_A_THREAD = (
    "Exception in thread Thread-4 (_pin_memory_loop):",
    "Traceback (most recent call last):",
    '  File "connection.py", line 388, in _recv',
    "EOFError",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
STORE_LEFT = (
    "[rank2]:[W1123 02:21:41.19 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3):"
    " Connection reset by peer"
)
HANDLED = ("Traceback (most recent call last):", "OSError: [Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("said", "how", "name"),
    [
        ((), {"signal": 11}, "segfault"),
        ((), {"signal": 7}, "segfault"),
        (("Fatal Python error: Segmentation fault",), {"signal": 11}, "segfault"),
        ((), {"signal": 6}, "abort"),
        (("free(): invalid pointer",), {"signal": 6}, "abort"),
        (("double free or corruption (!prev)",), {"signal": 6}, "abort"),
        (("corrupted size vs. prev_size",), {"signal": 6}, "abort"),
        (("*** stack smashing detected ***: terminated",), {"signal": 6}, "abort"),
        (("python: mm.c:7: get: Assertion `page' failed.",), {"signal": 6}, "abort"),
        (("F20250821 rdma_io.cc:811] Check failed: wc->status",), {"signal": 6}, "abort"),
        (
            ("pure virtual method called", "terminate called without an active exception"),
            {"signal": 6},
            "abort",
        ),
        (RAISED, {"exit_code": 1}, "python-exception"),
        ((*HANDLED, "goes on", *RAISED), {"exit_code": 1}, "python-exception"),
        ((*CAUSED, "goes on", *RAISED), {"exit_code": 1}, "python-exception"),
        ((*RAISED, *IGNORED), {"exit_code": 1}, "python-exception"),
        ((*RAISED, *OF_A_THREAD), {"exit_code": 1}, "python-exception"),
        ((*RAISED, STORE_LEFT), {"exit_code": 1}, "python-exception"),
        ((*RAISED[1:], *OF_A_THREAD, *RAISED), {"exit_code": 1}, "python-exception"),
        ((*IGNORED, "step 4", *HANDLED), {"exit_code": 1}, "disk-full"),
        (("free(): invalid pointer", *OF_A_THREAD, STORE_LEFT), {"signal": 6}, "abort"),
        (CAUSED, {"exit_code": 1}, "disk-full"),
        (("[feed] Connection reset by peer, once more",), {"signal": 6}, "abort"),
        ((), {"signal": 13}, "unknown"),
    ],
)
@pytest.mark.parametrize("old", [RETRIED_CONNECTION, RETRIED_NAME, PORT_RECOVERED])
def test_a_connection_that_succeeded_after_a_retry_is_not_the_cause(
    old: str, said: tuple[str, ...], how: dict[str, Any], name: str
) -> None:
    """RETRIED_CONNECTION is from a real job in which SIGSEGV ended rank 2."""
    crashed = exited(2, at=START + 50, log_tail=(old, "step 3", *said), **how)
    found = verdict(crashed, raised(3, GLOO_CLOSED, at=START + 50.1))
    assert found.failure is not None
    assert (found.failure.name, found.culprit.rank) == (name, 2)
    assert found.culprit.host == "host-1"


@pytest.mark.parametrize("line", ["NOTE: gradient overflow detected, ignoring", "[FSDP] 32 blocks"])
def test_a_line_about_a_step_does_not_start_an_abort(line: str) -> None:
    said = verdict(exited(2, log_tail=(line, RETRIED_CONNECTION, "step 3"), signal=signal.SIGABRT))
    assert said.failure is not None
    assert (said.failure.name, said.culprit.rank) == ("abort", 2)


@pytest.mark.parametrize(
    ("said", "name"),
    [(OF_A_THREAD, "service-unreachable"), ((*IGNORED, HANDLED[1]), "disk-full")],
)
def test_without_a_traceback_any_line_may_explain_an_exit(said: tuple[str, ...], name: str) -> None:
    """For example the exception of a thread, or one whose first lines are above the log tail."""
    found = verdict(exited(2, log_tail=("step 3", *said), exit_code=1))
    assert found.failure is not None
    assert found.failure.name == name


@pytest.mark.parametrize(
    ("tail", "name"),
    [
        ((*IGNORED, *FULL), "disk-full"),
        ((*IGNORED, "goes on", *IGNORED, *FULL, "leaves"), "disk-full"),
        ((*FULL, *IGNORED), "disk-full"),
        (("step 3", *IGNORED), "unknown"),
    ],
)
def test_ignored_exceptions_do_not_hide_other_errors(tail: tuple[str, ...], name: str) -> None:
    """The rank exited without a traceback."""
    found = verdict(exited(2, exit_code=1, log_tail=tail))
    assert found.failure is not None
    assert (found.failure.name, found.culprit.rank) == (name, 2)


@pytest.mark.parametrize(
    ("line", "how", "name"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 11, "uncorrectable-ecc"),
        (SIGTERM_REPORTED, 6, "scheduler-sigterm"),
        (WATCHDOG_LINE, 6, "nccl-watchdog-timeout"),
        (WATCHDOG_LINE, 11, "nccl-watchdog-timeout"),
        (
            "[rank1]:[E1123 ProcessGroupNCCL.cpp:1414] [PG 0 Rank 1] ProcessGroupNCCL's watchdog"
            " got stuck for 480 seconds without making progress in monitoring enqueued collectives",
            6,
            "nccl-watchdog-timeout",
        ),
    ],
)
def test_a_fatal_error_is_the_cause_even_if_more_was_printed(
    line: str, how: int, name: str
) -> None:
    said = verdict(exited(0, log_tail=("step 3", line, "step 4"), signal=how))
    assert said.failure is not None
    assert said.failure.name == name


def test_a_users_class_fits_a_kill_only_if_it_names_the_signal() -> None:
    rule = FailureRule(name="warned", scope="user", action="stop", patterns=("beware",))
    killed = exited(0, log_tail=("beware",))
    assert failure_name(killed, rule) == "sigkill-from-outside"
    assert failure_name(killed, replace(rule, signals=("SIGKILL",))) == "warned"
    assert failure_name(exited(0, signal=6, log_tail=("beware",)), rule) == "warned"


def failure_name(ended: RankExited, own: FailureRule) -> str:
    said = diagnose(findings(ended, own=(own,)), (own,))
    assert said.failure is not None
    return said.failure.name


# Kernel logs of hosts

FALLEN = "[51.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus."
CONTAINED = "[51.0] NVRM: Xid (PCI:0000:1b:00): 94, pid=7, Contained: SM."


def kernel(host: str, *lines: str) -> EvidenceGathered:
    return EvidenceGathered(
        at=START + 52, attempt=1, host=host, ranks=(), kernel=lines, unasked=True
    )


def test_broken_hardware_is_the_cause_even_if_its_rank_reports_a_symptom() -> None:
    exits = (raised(0, RESET, at=START + 49.9), raised(2, GLOO_CLOSED, at=START + 50.1))
    said = verdict(*exits, evidence=(kernel("host-1", FALLEN),))
    assert str(said.culprit) == "rank 2 on host-1"
    assert said.failure is not None
    assert (said.failure.name, said.failure.action) == ("gpu-lost", "replace")
    assert said.evidence.notes[0] == f"the kernel of host-1: {FALLEN}"
    assert said.signature == "", "a second time it is not the program's own"


COUNTED = "memory cgroup: oom_kill 0 -> 1: the kernel killed 1 of this group"
OOM = "[51.0] Memory cgroup out of memory: Killed process 123 (python) total-vm:1kB"
FAULT = "[51.0] NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python, MMU Fault"
CLEANUP = "[51.0] NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=python"
PORT = "[51.0] mlx5_core 0000:01:00.0: mlx5_0 port error"
READS = (
    "[51.0] I/O error, dev nvme0n1, sector 32545872 op 0x0:(READ) flags 0x80700 phys_seg 1 prio"
    " class 2"
)
SERVER = "[51.0] nfs: server 100.73.159.36 not responding, still trying"
MEMORY = "[51.0] EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0"
STALL = "[51.0] watchdog: BUG: soft lockup - CPU#5 stuck for 22s! [python:1234]"
NIC = "[51.0] mlx5_core 0000:4b:00.0: poll_health:800:(pid 0): Fatal error 1 detected"
REBOOT = (
    "[51.0] NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2"
    " (Node Reboot Required)"
)
CRASH = (
    "[51.0] traps: pt_gloo_runloop[3131] general protection fault ip:7f969e4b6a97 sp:7f96737fd730"
    " error:0 in libc.so.6[98a97,7f969e444000+156000]"
)
DENIAL = "[51.0] audit: Operation not permitted"
REMOTE = "NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: a peer is gone"


@pytest.mark.parametrize(
    ("ended", "line", "name"),
    [
        (exited(2), OOM, "host-out-of-memory"),
        (exited(2, signal=signal.SIGSEGV), OOM, "segfault"),
        (exited(2, signal=signal.SIGTERM), OOM, "scheduler-sigterm"),
        (raised(2, "shapes differ"), OOM, "python-exception"),
        (exited(2, signal=signal.SIGSEGV), FAULT, "xid-31-mmu-fault"),
        (exited(2, signal=signal.SIGTERM), FAULT, "scheduler-sigterm"),
        (raised(2, "CUDA error: misaligned address"), FAULT, "illegal-memory-access"),
        (raised(2, REMOTE), FAULT, "nccl-remote-error"),
        (raised(2, REMOTE), PORT, "infiniband-error"),
        (raised(2, REMOTE), NIC, "nic-failure"),
        (exited(2), READS, "storage-error"),
        (raised(2, REMOTE), READS, "storage-error"),
        (raised(2, "shapes differ"), READS, "python-exception"),
        (exited(2), SERVER, "storage-error"),
        (exited(2, signal=signal.SIGBUS), READS, "storage-error"),
        (exited(2, signal=signal.SIGSEGV), SERVER, "segfault"),
        (exited(2, signal=signal.SIGABRT), SERVER, "abort"),
        (exited(2, signal=signal.SIGSEGV), PORT, "segfault"),
        (replace(aborted(REMOTE), host="host-1"), READS, "storage-error"),
        (exited(2, signal=signal.SIGBUS), MEMORY, "host-memory-error"),
        (raised(2, REMOTE), MEMORY, "host-memory-error"),
        (raised(2, REMOTE), REBOOT, "xid-154-recovery"),
        (raised(2, REMOTE), STALL, "cpu-stall"),
        (raised(2, "shapes differ"), STALL, "python-exception"),
        (exited(2, signal=signal.SIGTERM), STALL, "scheduler-sigterm"),
        (exited(2, exit_code=exit_codes.CHECKPOINTED), STALL, "scheduler-sigterm"),
        (exited(2, signal=signal.SIGTERM), REBOOT, "xid-154-recovery"),
        (exited(2), CLEANUP, "sigkill-from-outside"),
        (exited(2), DENIAL, "sigkill-from-outside"),
        (exited(2), CRASH, "sigkill-from-outside"),
        (exited(2, exit_code=128 + signal.SIGKILL), CRASH, "sigkill-from-outside"),
        (exited(2, signal=signal.SIGSEGV), CRASH, "segfault"),
    ],
)
def test_the_kernel_log_decides_if_it_knows_more_than_the_rank(
    ended: RankExited, line: str, name: str
) -> None:
    said = verdict(ended, evidence=(kernel("host-1", line),))
    assert said.failure is not None
    assert said.failure.name == name


def test_a_fabric_error_in_several_kernel_logs_has_no_culprit() -> None:
    exits = (raised(0, REMOTE, at=START + 50), raised(2, REMOTE, at=START + 51))
    assert verdict(*exits, evidence=(kernel("host-1", PORT),)).culprit.host == "host-1"
    both = (kernel("host-0", PORT), kernel("host-1", PORT))
    assert verdict(*exits, evidence=both).culprit == NOBODY
    assert verdict(*exits, evidence=(kernel("host-1", SERVER),)).culprit.host == "host-1"
    both = (kernel("host-0", SERVER), kernel("host-1", SERVER))
    assert verdict(*exits, evidence=both).culprit == NOBODY


@pytest.mark.parametrize(
    ("kernels", "name", "action"),
    [
        ((), "loader-worker-killed", "restart"),
        ((kernel("host-1", OOM),), "host-out-of-memory", "stop"),
        ((kernel("host-1", COUNTED),), "host-out-of-memory", "stop"),
        ((kernel("host-0", OOM),), "loader-worker-killed", "restart"),
    ],
)
def test_a_killed_loader_worker_is_a_lack_of_memory_only_if_its_kernel_says_so(
    kernels: tuple[EvidenceGathered, ...], name: str, action: str
) -> None:
    killed = raised(2, "DataLoader worker (pid 1234) is killed by signal: Killed.")
    said = verdict(killed, evidence=kernels)
    assert said.failure is not None
    assert (said.failure.name, said.failure.action) == (name, action)


def test_a_hang_is_not_explained_by_low_memory_in_the_kernel_log() -> None:
    said = diagnose(findings(hang=hang(), judged=hang_judged(), evidence=(kernel("host-1", OOM),)))
    assert said.failure is not None
    assert said.failure.name == "hang"


def test_a_harmless_xid_does_not_excuse_a_failing_program() -> None:
    wrong = raised(2, "shapes differ", at=START + 50)
    said = verdict(wrong, evidence=(kernel("host-1", CONTAINED),))
    assert said.failure is not None
    assert said.failure.name == "python-exception"
    said = verdict(wrong, evidence=(kernel("host-1", FALLEN),))
    assert said.failure is not None
    assert said.failure.name == "gpu-lost"


@pytest.mark.parametrize(
    ("told", "blamed"),
    [
        ((kernel("host-1", FALLEN),), Culprit(host="host-1")),
        ((kernel("host-1", CONTAINED),), NOBODY),
        ((kernel("host-0", FALLEN), kernel("host-1", FALLEN)), NOBODY),
    ],
)
def test_the_only_broken_host_is_the_culprit_of_a_hang_without_another(
    told: tuple[EvidenceGathered, ...], blamed: Culprit
) -> None:
    said = diagnose(findings(hang=hang(), evidence=told))
    assert said.culprit == blamed
    assert ("broken hardware" in said.cause) == (blamed is not NOBODY)
    assert all(
        f"the kernel of {part.host}: {part.kernel[0]}" in said.evidence.notes for part in told
    )


@pytest.mark.parametrize("first", range(16))
def test_a_bad_loss_has_no_culprit_even_if_one_rank_reports_it_first(first: int) -> None:
    words = error("step 35: the loss is nan, not finite", "NotFinite", at_step=35)
    told = [
        exited(rank, exit_code=exit_codes.UNSTABLE, error=words, at=START + (rank - first) % 16)
        for rank in range(16)
    ]
    said = verdict(*told)
    assert (said.culprit, said.failure and said.failure.name) == (NOBODY, "nan-loss")
    assert said.cause == (
        "all ranks failed alike: NotFinite: step 35: the loss is nan, not finite"
        f" (rank {first} reported it first)"
    )
    assert said.signature == "NotFinite: step 35: the loss is nan, not finite at step 35"


def test_a_bad_loss_without_its_message_has_no_culprit_either() -> None:
    said = verdict(exited(3, exit_code=exit_codes.UNSTABLE))
    assert said.culprit == NOBODY
    assert said.cause == "all ranks exited with code 79 (rank 3 first)"


def test_broken_hardware_in_the_kernel_log_outweighs_a_bad_loss() -> None:
    words = error("step 35: the loss is nan, not finite", "NotFinite", at_step=35)
    xid = "[51.0] NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."
    kernel = EvidenceGathered(at=START + 51, attempt=1, host="host-1", ranks=(), kernel=(xid,))
    told = exited(2, exit_code=exit_codes.UNSTABLE, error=words)
    assert verdict(told, evidence=(kernel,)).culprit == Culprit(host="host-1", rank=2)
