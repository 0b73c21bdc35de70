"""Host strikes: weights, fading, pins, the file that jobs share, and `ndctl hosts`."""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from datetime import UTC
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.cli import cli
from orchestrator.contract.spec.failures import Remedy, Scope
from orchestrator.errors import JobError
from orchestrator.host_strikes import (
    HALF_LIFE_S,
    LOCAL,
    SMALL,
    STRAGGLER,
    Cleared,
    Failure,
    Line,
    Pinned,
    Strike,
    Unpinned,
    Withdrawn,
    always,
    cleared,
    excluded,
    fold,
    hosts_text,
    path_of,
    recall,
    record,
    records,
    weight,
)
from orchestrator.system import SystemClock

NOW = 1_800_000_000.0


def strike(
    host: str = "node1",
    at: float = NOW,
    attempt: int = 1,
    job: str = "llama",
    submitted: float | None = NOW - 60,
    weight: float = 1.0,
) -> Strike:
    return Strike(
        at=at,
        host=host,
        job=job,
        attempt=attempt,
        kind="host-lost",
        cause="it said nothing",
        submitted=submitted,
        weight=weight,
    )


def test_two_strikes_within_a_day_exclude_a_host_for_a_day(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    record(path, strike(at=NOW - HALF_LIFE_S))
    assert excluded(path, NOW) == {}
    record(path, strike(at=NOW, attempt=2))
    why = excluded(path, NOW + 1)
    assert list(why) == ["node1"]
    assert why["node1"].startswith("excluded until 2027-01-16 08:00:00 UTC: 2 strikes, last host")
    assert "in llama: it said nothing" in why["node1"]
    assert "node1" in excluded(path, NOW + HALF_LIFE_S - 1)
    assert excluded(path, NOW + HALF_LIFE_S) == {}


def straggler_strike(at: float, attempt: int = 1) -> Strike:
    return replace(strike(at=at, attempt=attempt), kind=STRAGGLER)


def test_the_first_straggler_strike_of_a_host_counts_half_and_the_second_one() -> None:
    (once,) = fold([straggler_strike(NOW)], NOW)
    assert (once.score, once.is_excluded) == (0.5, False)
    (twice,) = fold([straggler_strike(NOW), straggler_strike(NOW, attempt=2)], NOW)
    assert twice.score == 1.5
    (spread,) = fold([straggler_strike(NOW - HALF_LIFE_S), straggler_strike(NOW, attempt=2)], NOW)
    assert (spread.score, spread.is_excluded) == (1.25, False)
    (third,) = fold([straggler_strike(NOW - HALF_LIFE_S * n, attempt=n) for n in range(3)], NOW)
    assert third.is_excluded
    (broken,) = fold([straggler_strike(NOW), strike(at=NOW, attempt=2)], NOW)
    assert broken.score == 1.5, "a failure of the host counts 1"


def test_two_strikes_more_than_a_day_apart_exclude_no_host(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    record(path, strike(at=NOW - HALF_LIFE_S - 60))
    record(path, strike(at=NOW, attempt=2))
    assert excluded(path, NOW) == {}


def test_a_host_that_fails_a_little_less_than_daily_is_finally_excluded() -> None:
    """Strikes 25 hours apart never fall within one day, but they add up."""
    strikes = [strike(at=NOW + 25 * 3600 * i, attempt=i) for i in range(4)]
    until = [fold(strikes[:n], strikes[n - 1].at + 1)[0].excluded_until for n in range(1, 5)]
    assert until[:2] == [None, None]
    assert until[2] is not None
    assert until[3] is not None
    assert until[3] - strikes[3].at > until[2] - strikes[2].at, (
        "more failures exclude it for longer"
    )


def test_strikes_fade() -> None:
    (found,) = fold([strike(), strike(attempt=2)], NOW + 2 * HALF_LIFE_S)
    assert found.score == pytest.approx(0.5)
    assert len(found.strikes) == 2
    assert not found.is_excluded


def pinned(use: Literal["never", "always"], at: float = NOW, host: str = "node1") -> Pinned:
    return Pinned(at=at, host=host, use=use, by="ada", reason="burnt connector")


def test_a_pinned_host_is_never_used_until_it_is_unpinned(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    record(path, pinned("never"))
    why = excluded(path, NOW + 1000 * HALF_LIFE_S)["node1"]
    assert "pinned: never used, by ada since 2027-01-15" in why
    assert why.endswith("burnt connector")
    record(path, Cleared(at=NOW + 1, host="node1", by="bob"))
    assert "node1" in excluded(path, NOW + 2), "clearing strikes does not unpin"
    record(path, Unpinned(at=NOW + 3, host="node1", by="ada"))
    assert excluded(path, NOW + 4) == {}
    assert fold(recall(path), NOW + 4) == ()


def test_a_pinned_host_is_used_despite_its_strikes(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    for attempt in range(4):
        record(path, strike(at=NOW + attempt, attempt=attempt))
    record(path, pinned("always", NOW + 5))
    assert excluded(path, NOW + 6) == {}
    assert always(path, NOW + 6) == ("node1",)
    record(path, Unpinned(at=NOW + 7, host="node1", by="ada"))
    assert list(excluded(path, NOW + 8)) == ["node1"]
    assert always(path, NOW + 8) == ()


def test_a_repeated_strike_counts_once() -> None:
    (found,) = fold([strike(), strike(at=NOW + 5)], NOW + 6)
    assert found.strikes == (strike(),)
    assert found.excluded_until is None
    (found,) = fold([strike(), strike(job="other")], NOW)
    assert found.excluded_until == pytest.approx(NOW + HALF_LIFE_S * math.log2(2 / 0.75))


@pytest.mark.parametrize("submitted", [NOW - 1, None])
def test_a_new_run_of_a_job_gives_new_strikes(submitted: float | None) -> None:
    """`submit --new` starts at attempt 1 again. Old lines have no time of submission."""
    again = strike(at=NOW + 5, submitted=submitted)
    (found,) = fold([replace(strike(), submitted=submitted and NOW - 60), again], NOW + 6)
    assert len(found.strikes) == 2
    assert found.is_excluded


def test_the_time_of_the_last_clearing_is_known_for_hosts_without_strikes_too(
    tmp_path: Path,
) -> None:
    path = path_of(tmp_path, "tb")
    assert cleared(path) == {}
    for at, host in ((NOW, "node1"), (NOW + 5, "node1"), (NOW + 1, "node2")):
        record(path, Cleared(at=at, host=host, by="ada"))
    assert cleared(path) == {"node1": NOW + 5, "node2": NOW + 1}
    local = path_of(tmp_path, "local")
    record(local, Cleared(at=NOW, host="host-1", by="ada"))
    assert cleared(local) == {}, "hosts of local jobs are only names"


def test_a_cleared_host_starts_without_strikes() -> None:
    message = Cleared(at=NOW + 2, host="node1", by="ada")
    lines: list[Line] = [strike(), strike(at=NOW + 1, attempt=2), message]
    assert fold(lines, NOW + 3) == ()
    (found,) = fold([*lines, strike(at=NOW + 4, attempt=3)], NOW + 5)
    assert (len(found.strikes), found.excluded_until) == (1, None)


@given(st.permutations([strike(at=NOW + i, attempt=i, host=f"n{i % 3}") for i in range(7)]))
def test_the_order_of_the_lines_does_not_matter(lines: list[Strike]) -> None:
    assert fold(lines, NOW + 9) == fold(sorted(lines, key=lambda line: line.at), NOW + 9)


def test_hosts_of_the_local_backend_get_no_strikes(tmp_path: Path) -> None:
    path = path_of(tmp_path, LOCAL)
    for attempt in range(3):
        record(path, strike(host="host-0", attempt=attempt))
    assert excluded(path, NOW) == {}


def test_a_torn_line_is_ignored_alone(tmp_path: Path) -> None:
    path = path_of(tmp_path, "tb")
    assert recall(path) == ()
    record(path, strike())
    with path.open("ab") as file:
        file.write(b'{"strike":{"at":18')  # the node of the writer lost power
    assert recall(path) == (strike(),)
    record(path, strike(attempt=2))
    assert recall(path) == (strike(), strike(attempt=2))


GOOD = {"at": NOW, "host": "node1", "job": "j", "attempt": 1, "kind": "hang", "cause": "c"}
BAD = {
    "deep": b"[" * 200_000,
    "deep in a key": b'{"strike":' * 5_000 + b"1" + b"}" * 5_000,
    "huge": b'"' + b"x" * 1_000_000 + b'"',
    "zeros": b"\0" * 500,
    "no UTF-8": b"\xff\xfe\xfd",
    "digits": b"1" * 5_000,
    "null": b"null",
    "far off": json.dumps({"strike": GOOD | {"at": 1e300}}).encode(),
    "no date": json.dumps({"strike": GOOD | {"at": 1e14}}).encode(),
    "many digits": json.dumps({"strike": GOOD | {"at": 10**400}}).encode(),
    "before 1970": json.dumps({"strike": GOOD | {"at": -1}}).encode(),
    "submitted": json.dumps({"strike": GOOD | {"submitted": 1e15}}).encode(),
    "heavy": json.dumps({"strike": GOOD | {"weight": 1e9}}).encode(),
    "lighter than none": json.dumps({"strike": GOOD | {"weight": -1}}).encode(),
    "no number": b'{"strike": {"at": NaN}}',
    "surrogate": json.dumps(
        {"pinned": {"at": NOW, "host": "\ud800", "use": "never", "by": "me", "reason": "r"}}
    ).encode(),
    "type": json.dumps({"strike": GOOD | {"host": 3}}).encode(),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_line_is_skipped_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    path = path_of(tmp_path, "tb")
    record(path, strike())
    path.write_bytes(path.read_bytes() + bad + b"\n")
    record(path, strike(attempt=2))
    for _ in range(2):  # a leader reads the file repeatedly
        assert recall(path) == (strike(), strike(attempt=2))
        assert list(excluded(path, NOW)) == ["node1"]
        assert always(path, NOW) == ()
        assert hosts_text(records(tmp_path, NOW), UTC)
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert message.startswith(f"ignoring line 2 of {path}: ")
    assert len(message) < len(str(path)) + 250
    assert "\n" not in message


def test_the_first_of_many_bad_lines_are_named_and_the_rest_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(tmp_path, "tb")
    record(path, strike())
    path.write_bytes(path.read_bytes() + b"no\n" * 1_000)
    assert recall(path) == (strike(),)
    assert len(caplog.records) == 4
    assert caplog.messages[-1] == f"ignoring 997 more lines of {path}"


def _append(path: Path, job: str) -> None:
    for attempt in range(50):
        record(path, strike(job=job, attempt=attempt))


@pytest.mark.process
def test_many_jobs_append_at_once(tmp_path: Path) -> None:
    path, context = path_of(tmp_path, "tb"), get_context("fork")
    writers = [context.Process(target=_append, args=(path, f"job-{i}")) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
        assert writer.exitcode == 0
    expected = {(f"job-{i}", attempt) for i in range(4) for attempt in range(50)}
    found = [(line.job, line.attempt) for line in recall(path) if isinstance(line, Strike)]
    assert len(found) == 200
    assert set(found) == expected


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (Failure(kind="host-lost"), 1.0),
        (Failure(kind="hang"), 1.0),
        (Failure(kind="preflight"), 1.0),
        (Failure(kind="leader-lost"), 1.0),
        (Failure(kind="rank-killed", signal="SIGBUS"), 1.0),
        (Failure(kind="rank-killed", signal="SIGKILL", name="kernel-panic"), 1.0),
        (Failure(kind="rank-killed", signal="SIGKILL", name="sigkill-from-outside"), SMALL),
        (Failure(kind="exception", name="gpu-busy", scope="host", remedy="replace"), SMALL),
        (Failure(kind="exception", name="gpu-not-visible", scope="host", remedy="replace"), SMALL),
        (Failure(kind="exception", name="loader-worker-killed", scope="host"), 0.0),
        (Failure(kind="rank-killed", signal="SIGSEGV"), 0.0),
        (Failure(kind="rank-killed", signal="SIGTERM"), 0.0),
        (Failure(kind="rank-killed", signal="SIGBUS", drill="kill:rank=0@step=2"), 0.0),
        (Failure(kind="exception"), 0.0),
        (Failure(kind="rank-exited"), 0.0),
        (Failure(kind="rank-stopped"), 0.0),
        (Failure(kind="preempted"), 0.0),
    ],
)
def test_the_weight_of_each_kind_of_incident(failure: Failure, expected: float) -> None:
    assert weight(failure) == expected


@pytest.mark.parametrize(
    ("kind", "signal", "scope", "remedy", "expected"),
    [
        ("exception", None, "host", "replace", 1.0),
        ("rank-killed", "SIGABRT", "host", "replace", 1.0),
        ("exception", None, "host", "restart", 0.0),
        ("exception", None, "storage", "replace", 0.0),
        ("exception", None, "user", "replace", 0.0),
        ("rank-killed", "SIGKILL", "user", "stop", 0.0),
        ("rank-killed", "SIGKILL", "host", "restart", 1.0),
        ("hang", None, "rank", "replace", 1.0),
    ],
)
def test_the_failure_class_decides_whether_the_host_gets_a_strike(
    kind: str, signal: str | None, scope: Scope, remedy: Remedy, expected: float
) -> None:
    failure = Failure(kind=kind, signal=signal, scope=scope, remedy=remedy)
    assert weight(failure) == expected
    assert weight(replace(failure, drill="kill:rank=0@step=2")) == 0


@pytest.mark.parametrize("remedy", ["restart", "replace"])
def test_an_unexplained_kill_is_a_quarter_of_a_strike(
    remedy: Remedy,
) -> None:
    """It may be a `kill -9` by a person, which no kernel log shows."""
    killed = Failure(
        kind="rank-killed", signal="SIGKILL", name="sigkill-from-outside", scope="host"
    )
    assert weight(replace(killed, remedy=remedy)) == SMALL
    kills = [strike(at=NOW + n, attempt=n, weight=SMALL) for n in range(7)]
    for count in range(1, 7):
        (found,) = fold(kills[:count], NOW + 10)
        assert not found.is_excluded, f"after {count}"
    (found,) = fold(kills, NOW + 10)
    assert found.is_excluded
    (found,) = fold([kills[0], strike(at=NOW + 1, attempt=9)], NOW + 10)
    assert not found.is_excluded, "one such kill and one lost host"


# ndctl hosts


def test_expired_strikes_are_shown_on_demand(tmp_path: Path) -> None:
    now = SystemClock().now()
    path = path_of(tmp_path, "tb")
    record(path, strike(at=now - 8 * HALF_LIFE_S))
    record(path, strike(at=now, attempt=2))
    record(path, strike("node2", at=now - 8 * HALF_LIFE_S))
    record(path, strike("node3", at=now - 8 * HALF_LIFE_S))
    record(path, pinned("never", host="node3"))

    def strike_counts(*options: str) -> dict[str, int]:
        output = CliRunner().invoke(cli, ["hosts", "--run-root", str(tmp_path), "--json", *options])
        return {host["host"]: len(host["strikes"]) for host in json.loads(output.output)["hosts"]}

    assert strike_counts() == {"node1": 1, "node3": 0}
    assert strike_counts("--all") == {"node1": 2, "node2": 1, "node3": 1}


def ndctl(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, words)
    return done.exit_code, done.output if done.exception is None else str(done.exception)


def test_hosts_are_listed_with_their_evidence_and_cleared(tmp_path: Path) -> None:
    from orchestrator.system import SystemClock

    now = SystemClock().now()
    root = ["--run-root", str(tmp_path)]
    nothing = f"no strikes in {tmp_path}; `ndctl hosts --all` shows the hosts of all jobs\n"
    assert ndctl("hosts", *root) == (0, nothing)
    without = f"no strikes in {tmp_path}, and no known job uses a host\n"
    assert ndctl("hosts", "--all", *root) == (0, without)
    for attempt in (1, 2):
        record(path_of(tmp_path, "tb"), strike(at=now - 60, attempt=attempt))
        record(path_of(tmp_path, LOCAL), strike(host="host-0", at=now - 60, attempt=attempt))
    code, message = ndctl("hosts", *root)
    assert code == 0
    table, _, details = message.partition("\n\n")
    assert [line.split()[:3] for line in table.splitlines()[1:]] == [
        ["node1", "tb", "excluded"],
        ["host-0", "local", "allowed"],
    ]
    first, strike_line, _, local, *_ = details.splitlines()
    assert first.startswith("tb/node1  2 strikes with a current weight of 2.00, excluded until 20")
    assert strike_line.endswith("host-lost in llama, attempt 1: it said nothing")
    assert local.startswith(
        "local/host-0  2 strikes with a current weight of 2.00, may be used: the hosts of local"
    )
    body = json.loads(ndctl("hosts", *root, "--json")[1])["hosts"]
    assert [(row["cluster"], row["host"], row["excluded"]) for row in body] == [
        ("tb", "node1", True),
        ("local", "host-0", False),
    ]
    assert body[0]["strikes"][0]["cause"] == "it said nothing"
    words = "in tb; a job that replaced it can use it again when its next leader starts"
    assert ndctl("hosts", *root, "clear", "node1") == (0, f"cleared node1 {words}\n")
    assert "tb/" not in ndctl("hosts", *root)[1]


def test_clearing_a_host_without_strikes_is_an_error(tmp_path: Path) -> None:
    code, message = ndctl("hosts", "--run-root", str(tmp_path), "clear", "node1")
    assert code == 1
    assert "node1 has no strikes" in message


def test_a_replaced_host_without_strikes_is_cleared_on_a_named_cluster(
    tmp_path: Path,
) -> None:
    path = path_of(tmp_path, "tb")
    record(path, strike(host="node2"))
    root = ["--run-root", str(tmp_path)]
    assert ndctl("hosts", *root, "clear", "node1")[0] == 1
    assert ndctl("hosts", *root, "clear", "node1", "--cluster", "tb")[0] == 0
    assert list(cleared(path)) == ["node1"]
    assert ndctl("hosts", *root, "clear", "node1", "--cluster", "typo")[0] == 1


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".hosts").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        record(path_of(tmp_path, "tb"), strike())
    assert list(tmp_path.iterdir()) == [tmp_path / ".hosts"]


def test_a_host_is_pinned_and_unpinned_by_name(tmp_path: Path) -> None:
    root = ["--run-root", str(tmp_path)]
    pin = ("pin", "node9", "--never", "--reason", "burnt connector")
    code, message = ndctl("hosts", *root, *pin)
    assert code == 1
    assert "cluster of node9 unknown" in message
    code, message = ndctl("hosts", *root, *pin, "--cluster", "tb")
    assert code == 0
    assert message.startswith(
        "pinned node9 of tb: never used from the next start, until `ndctl hosts"
    )
    code, message = ndctl("hosts", *root)
    assert "\ntb/node9  0 strikes, pinned: never used until" in message
    assert "burnt connector" in message
    (row,) = json.loads(ndctl("hosts", *root, "--json")[1])["hosts"]
    assert (row["excluded"], row["pin"]["use"], row["pin"]["reason"]) == (
        True,
        "never",
        "burnt connector",
    )
    code, message = ndctl("hosts", *root, "pin", "node9", "--always", "--reason", "repaired")
    assert message.startswith("pinned node9 of tb: always used")
    assert ndctl("hosts", *root, "unpin", "node9") == (0, "unpinned node9 in tb\n")
    code, message = ndctl("hosts", *root, "unpin", "node9")
    assert code == 1
    assert "node9 is not pinned" in message
    code, message = ndctl("hosts", *root, *pin, "--cluster", LOCAL)
    assert code == 1
    assert "not real hosts" in message


def test_a_strike_shows_its_evidence(tmp_path: Path) -> None:
    found = replace(strike(), evidence=("NVRM: Xid 79", "rank 3: killed by SIGKILL"))
    record(path_of(tmp_path, "tb"), found)
    assert recall(path_of(tmp_path, "tb")) == (found,)
    message = ndctl("hosts", "--run-root", str(tmp_path))[1]
    assert "    NVRM: Xid 79\n    rank 3: killed by SIGKILL\n" in message


def test_an_unreadable_file_excludes_no_hosts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(tmp_path, "tb")
    path.mkdir(parents=True)
    assert excluded(path, NOW) == {}
    assert always(path, NOW) == ()
    assert "excluding no hosts, failed to read host strikes" in caplog.text


@pytest.mark.parametrize(
    "words",
    [["hosts"], ["hosts", "clear", "n"], ["hosts", "pin", "n", "--never", "--reason", "x"]],
)
def test_a_user_gets_an_error_if_strikes_cannot_be_read(tmp_path: Path, words: list[str]) -> None:
    path_of(tmp_path, "tb").mkdir(parents=True)
    done = CliRunner().invoke(cli, [words[0], "--run-root", str(tmp_path), *words[1:]])
    assert isinstance(done.exception, JobError)
    assert "cannot be read or written: " in done.exception.message
    assert "chmod" in done.exception.fix


@pytest.mark.parametrize(
    ("run_root", "folder", "file"),
    [(0o700, 0o700, 0o600), (0o2775, 0o2775, 0o664), (0o1777, 0o1777, 0o666)],
)
def test_users_of_a_shared_run_root_share_the_strikes(
    tmp_path: Path, run_root: int, folder: int, file: int
) -> None:
    """The umask of the user who writes first does not matter."""
    tmp_path.chmod(run_root)
    path = path_of(tmp_path, "tb")
    with umask(0o077):
        record(path, strike())
        record(path, strike(attempt=2))
    assert stat.S_IMODE(path.parent.stat().st_mode) == folder
    assert stat.S_IMODE(path.stat().st_mode) == file
    assert len(recall(path)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
def test_another_user_reads_and_appends(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    fd = os.open(tmp_path, os.O_PATH)
    path = path_of(Path(f"/proc/self/fd/{fd}"), "tb")  # other users cannot enter the folders above
    with umask(0o077):
        record(path, strike())
    os.seteuid(65534)
    try:
        record(path, strike(attempt=2))
        assert len(recall(path)) == 2
    finally:
        os.seteuid(0)
        os.close(fd)


@contextlib.contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def test_a_withdrawn_strike_does_not_count_in_whatever_order_the_lines_come(tmp_path: Path) -> None:
    withdrawn = Withdrawn(
        at=NOW + 5, host="node1", job="llama", attempt=1, kind="host-lost", submitted=NOW - 60
    )
    other = strike(attempt=2)
    orders: list[list[Line]] = [[strike(), withdrawn, other], [withdrawn, other, strike()]]
    for lines in orders:
        (found,) = fold(lines, NOW + 10)
        assert found.strikes == (other,)
    assert fold([strike(), withdrawn], NOW + 10) == ()
    path = path_of(tmp_path, "tb")
    for line in (strike(), withdrawn):
        record(path, line)
    assert recall(path) == (strike(), withdrawn)


def test_a_withdrawal_of_another_incident_changes_nothing() -> None:
    base = Withdrawn(
        at=NOW + 5, host="node1", job="llama", attempt=1, kind="host-lost", submitted=NOW - 60
    )
    for changed in ({"host": "node2"}, {"job": "x"}, {"attempt": 2}, {"submitted": NOW}):
        records = {one.host: one for one in fold([strike(), replace(base, **changed)], NOW)}
        assert records["node1"].strikes == (strike(),)
