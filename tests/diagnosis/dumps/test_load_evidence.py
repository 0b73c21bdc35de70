"""Reading dumps and stacks from files: those of torch 2.13 on gloo, and malicious ones."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.app.diagnose_job import diagnose_folder
from orchestrator.cli import cli
from orchestrator.diagnosis.dumps.dump import Unreadable, condense, parse
from orchestrator.diagnosis.dumps.load_evidence import below, rank_of, read_folder
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import HangEvidence
from orchestrator.diagnosis.stacks.python_stacks import main_stack, talks
from orchestrator.errors import JobError
from tests.diagnosis.hang.test_post_mortem import ALL, USUAL, call
from tests.diagnosis.simulated_hang import simulate_hang

FLIGHT = Path(__file__).parents[2] / "captured" / "flight"


def test_dumps_of_torch_name_the_rank_that_skipped_a_collective() -> None:
    """Four ranks on gloo. All except rank 3 called an all-reduce of the whole job."""
    scene = read_folder(FLIGHT)
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    verdict = analyse(scene)
    assert (verdict.kind, verdict.ranks) == ("never-entered", (3,))
    assert verdict.hosts == ()


def test_pickle_and_json_of_a_dump_give_the_same_result() -> None:
    raw = simulate_hang(1, mesh=(2, 1, 2, 1, 2), fault="loader").raw
    for rank, dump in raw.items():
        pickled = condense(rank, parse(pickle.dumps(dump, protocol=2)))
        assert condense(rank, parse(json.dumps(dump).encode())) == pickled


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_a_pickle_that_would_run_code_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unreadable, match=r"builtins\.print"):
        parse(pickle.dumps({"entries": [Hostile()]}))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"{", b"[1]", b'{"entries": 3}'])
def test_a_damaged_dump_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse(data)


@pytest.mark.parametrize("entries", [{"entries": []}, {}])
def test_the_dump_of_a_rank_without_calls_is_valid(entries: dict[str, Any]) -> None:
    """torch 2.13 omits empty `entries` in JSON."""
    groups = {"": {"desc": "", "name": "", "ranks": "[0]"}}
    idle = {"comm_lib_version": "", "pg_config": groups, "pg_status": {}, "version": "2.10"}
    assert condense(0, parse(json.dumps({**idle, **entries}).encode())).seats == {}


def test_other_json_is_not_a_dump() -> None:
    with pytest.raises(Unreadable, match="neither entries nor groups"):
        parse(b'{"loss": 2.5, "version": "1"}')


@pytest.mark.parametrize("inside", ["a list", "a dict"])
def test_a_dump_of_an_old_torch_is_called_that(inside: str) -> None:
    entry = {"record_id": 0, "pg_id": 0, "seq_id": 1, "profiling_name": "nccl:all_reduce"}
    data = pickle.dumps([entry] if inside == "a list" else {"version": "1.5", "entries": [entry]})
    with pytest.raises(Unreadable, match=r"torch 2\.3 or older wrote it"):
        condense(0, parse(data))


MALFORMED: tuple[Any, ...] = (
    None,
    5,
    10**9,
    "x",
    [],
    [1],
    {},
    {"a": 1},
    -1,
    1.5,
    "[0,",
    True,
    [None],
    float("inf"),
)


def test_a_malformed_dump_is_unreadable_or_can_be_analysed() -> None:
    good = json.loads((FLIGHT / "rank-3.json").read_text())
    good["entries"] = good["entries"][-2:]
    other = condense(1, parse(json.dumps(good).encode()))
    for path in list(paths(good)):
        for wrong in MALFORMED:
            bad = json.loads(json.dumps(good))
            inner = bad
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = wrong
            try:
                dump = condense(0, parse(json.dumps(bad).encode()))
            except Unreadable:
                continue
            analyse(HangEvidence(dumps={0: dump, 1: other}))


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    if above:
        yield above
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield from paths(value[key], (*above, key))


def test_a_dump_of_another_rank_than_its_name_says_is_unreadable() -> None:
    good = json.loads((FLIGHT / "rank-3.json").read_text())
    group = good["entries"][0]["process_group"][0]
    good["pg_config"][group] = {"name": group, "desc": "mesh_tp", "ranks": "[2, 3]"}
    assert condense(3, parse(json.dumps(good).encode())).seats
    with pytest.raises(Unreadable, match="which rank 1 is not in"):
        condense(1, parse(json.dumps(good).encode()))


def test_a_second_file_of_a_rank_never_replaces_a_better_one(
    tmp_path: Path,
) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(FLIGHT, dumps)
    groups = {"version": "2.10", "pg_config": {}}
    (dumps / "z_0").write_text(json.dumps(groups))
    (dumps / "a_1").write_text(json.dumps(groups))
    (dumps / "eval-3.json").write_text('{"loss": 2}')
    (dumps / "rank-2.stacks").write_text(
        'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in f'
    )
    (dumps / "rank2.txt").write_text("notes")
    scene = read_folder(dumps)
    assert analyse(scene).ranks == (3,)
    assert scene.passed_over["z_0"] == "a second dump of rank 0, and empty; trace_0 is used"
    assert scene.passed_over["a_1"] == "a second dump of rank 1, and empty; trace_1 is used"
    assert set(scene.unreadable) == {"eval-3.json"}
    assert set(scene.passed_over) == {"z_0", "a_1", "rank2.txt"}


def test_an_unreadable_file_does_not_stop_the_diagnosis(tmp_path: Path) -> None:
    shutil.copytree(FLIGHT, tmp_path / "dumps")
    (tmp_path / "dumps" / "trace_1").write_bytes(b"\x80torn")
    scene = read_folder(tmp_path / "dumps")
    assert (sorted(scene.dumps), list(scene.unreadable)) == ([0, 2, 3], ["trace_1"])
    assert analyse(scene).ranks == (3,)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("flight-12", 12),
        ("nccl_trace_rank_3", 3),
        ("rank-7.stacks", 7),
        ("trace_4.json", 4),
        ("rank5_of_16.pickle", 5),
        ("nccl_trace_rank_3.json.gz", 3),
        # Names from https://github.com/pytorch/pytorch/issues/140879, and with other hosts.
        ("nccl_trace_rank_container-node07_40", 40),
        ("nccl_trace_rank_10.3.7.1_12", 12),
        ("nccl_trace_rank_4f2a9c1b_7", 7),
        ("nccl_trace_rank_node1.cluster_5", 5),
        ("rank4f.log", None),
        ("README", None),
    ],
)
def test_the_rank_is_in_the_file_name(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_both_formats_of_stacks_are_read() -> None:
    faulthandler = (
        "Thread 0x01 (most recent call first):",
        '  File "/venv/threading.py", line 3 in wait',
        "Current thread 0x02 (most recent call first):",
        '  File "/venv/torch/distributed/distributed_c10d.py", line 3245 in all_reduce',
        '  File "/job/main.py", line 9 in <module>',
    )
    py_spy = (
        'Thread 7 (idle): "MainThread"',
        "    all_reduce (torch/distributed/distributed_c10d.py:3245)",
        "    <module> (main.py:9)",
    )
    for lines in (faulthandler, py_spy):
        stack = main_stack(lines)
        assert [frame.function for frame in stack] == ["all_reduce", "<module>"]
        assert talks(stack)


def test_the_command_prints_culprit_and_evidence() -> None:
    shown = CliRunner().invoke(cli, ["diagnose", str(FLIGHT)])
    assert shown.exit_code == 0
    assert "rank 3 did not call the operation in which the others wait" in shown.output
    assert "3 of 4 ranks entered it, missing: rank 3" in shown.output
    found = json.loads(CliRunner().invoke(cli, ["diagnose", str(FLIGHT), "--json"]).output)
    assert (found["ranks"], found["hosts"], found["num_dumps"]) == ([3], [], 4)


def test_a_folder_without_evidence_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["diagnose", str(tmp_path)])
    assert isinstance(result.exception, JobError)


def test_a_folder_without_readable_files_is_an_error_with_the_reason(tmp_path: Path) -> None:
    for rank in range(10):
        (tmp_path / f"metrics-{rank}.json").write_text('{"loss": 2}')
    result = CliRunner().invoke(cli, ["diagnose", str(tmp_path)])
    assert isinstance(result.exception, JobError)
    assert "metrics-0.json: not a flight recorder dump" in str(result.exception)
    assert "and 2 more" in str(result.exception)


# One folder per host


OF_RANKS = sorted(FLIGHT.iterdir(), key=lambda path: rank_of(path.name) or 0)


def by_host(folder: Path, *, twice: bool = False) -> Path:
    for rank, path in enumerate(OF_RANKS):
        host = folder / f"node{rank // 2}"
        host.mkdir(exist_ok=True)
        number = rank % 2 if twice else rank
        shutil.copy(path, host / f"nccl_trace_rank_{number}")
    return folder


def test_dumps_in_one_folder_per_host_are_found_and_a_host_can_be_excluded(
    tmp_path: Path,
) -> None:
    scene, found = diagnose_folder(by_host(tmp_path))
    assert (found.kind, found.ranks, found.hosts) == ("never-entered", (3,), ("node1",))
    assert [scene.host(rank) for rank in range(4)] == ["node0", "node0", "node1", "node1"]


def test_a_single_subfolder_is_not_a_host(tmp_path: Path) -> None:
    shutil.copytree(FLIGHT, tmp_path / "dumps")
    _, found = diagnose_folder(tmp_path)
    assert (found.ranks, found.hosts) == ((3,), ())


def test_a_folder_named_after_a_rank_is_not_a_host(tmp_path: Path) -> None:
    for rank, path in enumerate(OF_RANKS):
        (tmp_path / f"rank_{rank}").mkdir()
        shutil.copy(path, tmp_path / f"rank_{rank}" / f"flight-{rank}")
    _, found = diagnose_folder(tmp_path)
    assert (found.ranks, found.hosts) == ((3,), ())


def test_folders_with_the_same_ranks_are_not_mixed(tmp_path: Path) -> None:
    """They may be of several attempts, or number ranks within their host."""
    with pytest.raises(JobError, match="node1: rank 0 is also in node0"):
        diagnose_folder(by_host(tmp_path, twice=True))


def test_an_unreadable_subfolder_is_reported_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("node0", "lost+found"):
        (tmp_path / host).mkdir()
    for path in FLIGHT.iterdir():
        shutil.copyfile(path, tmp_path / "node0" / path.name)
    monkeypatch.chdir(tmp_path)  # users other than root may not read folders above it
    tmp_path.chmod(0o755)
    (tmp_path / "lost+found").chmod(0)
    us = os.geteuid()
    try:
        if us == 0:
            os.seteuid(65534)  # root may read all
        files, why = below(Path())
    finally:
        os.seteuid(us)
        (tmp_path / "lost+found").chmod(0o755)
    assert list(why) == ["lost+found"]
    assert sorted(rank for rank, _ in files.dumps) == [0, 1, 2, 3]


def test_subfolders_of_a_folder_with_evidence_are_ignored(tmp_path: Path) -> None:
    shutil.copytree(FLIGHT, tmp_path / "now")
    by_host(tmp_path / "now")
    scene, found = diagnose_folder(tmp_path / "now")
    assert (found.ranks, found.hosts, dict(scene.unreadable)) == ((3,), (), {})


def test_last_calls_of_ended_ranks_are_found_too(tmp_path: Path) -> None:
    for host, lasts in enumerate(({0: USUAL, 1: USUAL}, {2: 2 * USUAL, 3: USUAL})):
        (tmp_path / f"node{host}").mkdir()
        ended_in(tmp_path / f"node{host}", lasts)
    _, found = diagnose_folder(tmp_path)
    assert (found.kind, found.ranks, found.hosts) == ("mismatch", (2,), ())


# Dumps that ranks wrote at exit


def ends(last: int) -> bytes:
    """The dump of a rank whose operations gloo marks as retired, even the last one."""
    made = [call(ALL, seq, USUAL) for seq in range(1, 9)]
    return pickle.dumps({"entries": [*made, call(ALL, 9, last)]}, protocol=2)


TAILS = {
    "0": ["RuntimeError: Connection closed by peer [127.0.0.1]:4"],
    "2": ["  Op: 9", "Is there a distributed collective mismatch in your code? (4 vs 8)"],
}


def ended_in(folder: Path, lasts: dict[int, int], tails: object = None) -> Path:
    """`lasts`: rank -> size of its last call; `tails`: last lines of the host's ranks."""
    for rank, last in lasts.items():
        (folder / f"last-flight-{rank}").write_bytes(ends(last))
    if tails is not None:
        (folder / "host-node1.jsonl").write_text(json.dumps({"log_tails": tails}) + "\n")
    return folder


def test_last_calls_of_ended_ranks_show_a_mismatch(tmp_path: Path) -> None:
    """These files suffice, in any folder."""
    scene, found = diagnose_folder(ended_in(tmp_path, {0: USUAL, 1: USUAL, 2: 2 * USUAL, 3: USUAL}))
    assert (found.kind, found.scope, found.ranks, found.hosts) == ("mismatch", "user", (2,), ())
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    shown = CliRunner().invoke(cli, ["diagnose", str(tmp_path)])
    assert "rank 2 (the program is wrong; do not exclude a host)" in shown.output
    assert "dumps of 4 ranks" in shown.output


def test_an_aborted_rank_without_a_dump_is_found_by_its_host_file(
    tmp_path: Path,
) -> None:
    _, found = diagnose_folder(ended_in(tmp_path, {0: USUAL, 1: USUAL, 3: USUAL}, TAILS))
    assert (found.kind, found.ranks) == ("mismatch", (2,))
    assert "rank 2 called another operation than its peers as operation 9" in found.cause


def test_a_rank_aborted_over_sizes_that_wrote_a_dump_is_not_the_culprit(tmp_path: Path) -> None:
    tails = {**TAILS, "1": TAILS["2"]}
    _, found = diagnose_folder(ended_in(tmp_path, {0: USUAL, 1: USUAL, 3: USUAL}, tails))
    assert found.ranks == (2,)


@pytest.mark.parametrize(
    "tails", [None, {}, {"2": ["Killed"]}, ["2"], {"2": 5, "x": ["a"], "": []}]
)
def test_a_peer_without_a_dump_for_another_reason_is_not_the_culprit(
    tmp_path: Path, tails: object
) -> None:
    """A killed rank has no dump either, and its peers lose a connection."""
    _, found = diagnose_folder(ended_in(tmp_path, {0: USUAL, 1: USUAL, 3: USUAL}, tails))
    assert (found.kind, found.ranks, found.hosts) == ("not-known", (), ())
    assert "do not show which rank is wrong" in found.cause


def test_a_hang_is_analysed_by_its_own_evidence_and_not_by_exits(
    tmp_path: Path,
) -> None:
    """Ranks that are stopped after a hang raise too, in any operation."""
    for path in FLIGHT.iterdir():
        shutil.copy(path, tmp_path)
    before = diagnose_folder(tmp_path)
    ended_in(tmp_path, {0: USUAL, 1: 2 * USUAL, 2: USUAL, 3: USUAL}, TAILS)
    assert diagnose_folder(tmp_path) == before
    assert (before[1].kind, before[1].ranks) == ("never-entered", (3,))


def test_an_unreadable_dump_at_exit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "last-flight-1").write_bytes(b"\x80\x02")
    with pytest.raises(JobError, match="last-flight-1: "):
        diagnose_folder(tmp_path)
    scene, found = diagnose_folder(ended_in(tmp_path, {0: USUAL, 2: 2 * USUAL, 3: USUAL}))
    assert found.ranks == (2,)
    assert list(scene.unreadable) == ["last-flight-1"]


def test_a_dump_of_nccl_on_a_gpu_is_read() -> None:
    """Two groups of one rank on an H200, NCCL 2.28.9, torch 2.11. All operations have completed."""
    scene = read_folder(FLIGHT.parent / "nccl")
    assert analyse(scene).advice.startswith("collect the stacks"), "the recorder was on"
    dump = scene.dumps[0]
    groups = {group.desc: seat for group, seat in dump.seats.items()}
    assert {desc: (seat.behind, seat.pending) for desc, seat in groups.items()} == {
        "default_pg": (6, ()),
        "fsdp": (10, ()),
    }
    kinds = {call.op.kind for seat in groups.values() for call in seat.calls}
    assert kinds >= {"all_reduce", "broadcast", "_reduce_scatter_base", "coalesced"}
