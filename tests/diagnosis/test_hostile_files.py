"""Malicious files cannot break the reader. Each is reported with a reason, and the rest is used."""

import gzip
import json
import os
import pickle
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.diagnosis.dumps import reader
from orchestrator.diagnosis.dumps.dump import MOST_BYTES
from orchestrator.diagnosis.dumps.load_evidence import ended_by_class, read_folder
from orchestrator.diagnosis.dumps.reader_client import MANY, MOST_DEATHS, read_dumps
from orchestrator.diagnosis.hang.analyse import analyse

FLIGHT = Path(__file__).parents[1] / "captured" / "flight"
CPU_S = 60.0
"""Limit in seconds. The tests take 12 s on an idle machine, and minutes without their limits."""
MOST_KIB = 3 << 20


def entry(**other: Any) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "state": "scheduled",
        "is_p2p": False,
        **other,
    }


def dumped(**other: Any) -> bytes:
    return pickle.dumps({"entries": [entry(**other)]}, protocol=2)


def nested(depth: int, opcode: bytes = b"\x85") -> bytes:
    """Nested tuples as the key of a dict. To hash it, Python needs one C frame per level."""
    return b"\x80\x02}(" + b"N" + opcode * depth + b"Nu."


def billion_laughs() -> bytes:
    """Nested lists with ten references each, which print as 10^9 numbers or more."""
    inner: Any = [1] * 10
    for _ in range(9):
        inner = [inner] * 10
    return dumped(input_sizes=inner)


def many_ranks() -> bytes:
    ranks = json.dumps(list(range(3_000_000)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return pickle.dumps({"entries": [entry()], "pg_config": config}, protocol=2)


def deep_name() -> bytes:
    name: Any = ()
    for _ in range(1_000_000):
        name = (name,)
    head = pickle.dumps({"entries": [entry(process_group=("@@", "d"))]}, protocol=2)
    return head.replace(b"X\x02\x00\x00\x00@@", b")" + b"\x85" * 1_000_000)


MALICIOUS: dict[str, Callable[[], bytes]] = {
    "nested": lambda: nested(1_000_000),
    "a name that is nested": deep_name,
    "shared references": billion_laughs,
    "memo": lambda: b"Nr" + struct.pack("<I", 0x07FFFFFF) + b".",
    "ranks": many_ranks,
    "a list that never ends": lambda: b"\x80\x02" + b"]" * 5_000_000,
    "deep json": lambda: b'{"entries": ' + b"[" * 200_000,
    "a long name": lambda: dumped(profiling_name="nccl:" + "x" * 1_000_000),
    "a large number": lambda: dumped(input_sizes=[[10**5000]]),
    "a gzip bomb": lambda: gzip.compress(bytes(MOST_BYTES + 1)),
    "a cut gzip": lambda: gzip.compress(b"{}")[:12],
    "a reference to itself": lambda: b"\x80\x02}q\x00X\x07\x00\x00\x00entriesq\x01h\x00s.",
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_a_file_that_breaks_its_reader_is_reported_and_the_rest_is_used(
    kind: str, tmp_path: Path
) -> None:
    shutil.copytree(FLIGHT, tmp_path / "dumps")
    (tmp_path / "dumps" / "a-bad-7").write_bytes(MALICIOUS[kind]())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    scene = read_folder(tmp_path / "dumps")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert list(scene.unreadable) == ["a-bad-7"]
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    assert analyse(scene).ranks == (3,)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_S
    assert after.ru_maxrss < MOST_KIB
    assert len(scene.unreadable["a-bad-7"]) < 1_100


def test_dead_readers_are_replaced_up_to_a_limit(tmp_path: Path) -> None:
    for rank in range(MOST_DEATHS + 3):
        (tmp_path / f"bad-{rank:02}").write_bytes(nested(1_000_000))
    shutil.copy(FLIGHT / "trace_0", tmp_path / "good-90")
    files = [(rank, tmp_path / f"bad-{rank:02}") for rank in range(MOST_DEATHS + 3)]
    found = read_dumps([(90, tmp_path / "good-90"), *files])
    assert isinstance(found[0], reader.Read)
    whys = [one.why for one in found[1:] if isinstance(one, reader.Refused)]
    assert len(whys) == MOST_DEATHS + 3
    assert [why.startswith("not read: 16 earlier files") for why in whys] == (
        MOST_DEATHS * [False] + 3 * [True]
    )


def test_results_of_many_files_keep_their_order(tmp_path: Path) -> None:
    """With several readers, one of which dies before it has sent all its results."""
    good = (FLIGHT / "trace_1").read_bytes()
    for rank in range(MANY):
        path = tmp_path / f"flight-{rank}"
        path.write_bytes(nested(1_000_000) if rank == 1_203 else good)
    found = read_dumps([(rank, tmp_path / f"flight-{rank}") for rank in range(MANY)])
    refused = {place for place, one in enumerate(found) if isinstance(one, reader.Refused)}
    assert refused == {1_203}
    ranks = [one.dump.rank for one in found if isinstance(one, reader.Read)]
    assert ranks == [rank for rank in range(MANY) if rank != 1_203]


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    shutil.copytree(FLIGHT, dumps)
    os.mkfifo(dumps / "flight-8")
    os.mkfifo(dumps / "rank-8.stacks")
    os.mkfifo(dumps / "host-node9.jsonl")
    (dumps / "flight-9").symlink_to("flight-9")
    (dumps / "flight-10").mkdir()
    (dumps / "flight-11").symlink_to("/dev/zero")
    (dumps / "flight-12").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(dumps / "flight-13"))
        scene = read_folder(dumps)
    odd = {"flight-8", "rank-8.stacks", "flight-9", "flight-11", "flight-12", "flight-13"}
    assert scene.passed_over == dict.fromkeys(odd, "not a regular file")
    assert analyse(scene).ranks == (3,)
    assert not ended_by_class(dumps, "collective-mismatch")


def test_huge_files_are_read_only_in_part(tmp_path: Path) -> None:
    """The files are sparse, so they take no space on the disk."""
    dumps = tmp_path / "dumps"
    shutil.copytree(FLIGHT, dumps)
    for name in ("flight-8", "rank-3.stacks", "rank-2.log"):
        with (dumps / name).open("wb") as file:
            file.truncate(1 << 30)
    scene = read_folder(dumps)
    assert scene.unreadable == {"flight-8": "larger than 64 MiB"}
    assert scene.passed_over == {"rank-2.log": "a log without a stack"}
    assert analyse(scene).ranks == (3,)


def test_a_python_module_next_to_the_dumps_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FLIGHT, tmp_path / "dumps")
    for name in ("json.py", "orchestrator.py", "sitecustomize.py"):
        (tmp_path / "dumps" / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "dumps")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "dumps"))
    assert analyse(read_folder(Path())).ranks == (3,)
    assert not (tmp_path / "ran").exists()


def test_deeply_nested_json_in_a_host_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "host-node1.jsonl").write_text('{"log_tails": ' + "[" * 200_000)
    assert not ended_by_class(tmp_path, "collective-mismatch")
