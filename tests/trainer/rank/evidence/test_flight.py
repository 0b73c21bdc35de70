"""The flight recorder dump that a rank writes when an exception ends it."""

import pickle
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import LAST_FILES
from orchestrator.diagnosis.dumps.reader import Read
from orchestrator.diagnosis.dumps.reader_client import read_dumps
from tests.diagnosis.hang.test_post_mortem import ALL, call
from trainer.rank.evidence import flight
from trainer.rank.evidence.flight import LAST_CALLS, dump_at_end

RECORDER = "torch._C._distributed_c10d"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankEnv:
    """The environment of a rank that has called more collectives than the recorder keeps."""
    entries = [call(ALL, seq, 12) for seq in range(1, LAST_CALLS + 50)]
    dump = pickle.dumps({"version": "2.10", "entries": entries})
    recorder = SimpleNamespace(_dump_fr_trace=lambda *what: dump)
    monkeypatch.setitem(sys.modules, RECORDER, recorder)
    return RankEnv(rank=3, trace_dir=str(tmp_path))


def test_a_failing_rank_writes_its_last_collectives(env: RankEnv, tmp_path: Path) -> None:
    dump_at_end(env)
    written = tmp_path / f"{LAST_FILES}3"
    kept = pickle.loads(written.read_bytes())["entries"]
    assert [kept[0]["collective_seq_id"], kept[-1]["collective_seq_id"]] == [50, LAST_CALLS + 49]
    (found,) = read_dumps([(3, written)])
    assert isinstance(found, Read)
    assert found.dump.last is not None
    assert list(tmp_path.iterdir()) == [written], "nothing that looks like a dump of a hang"


def test_hanging_storage_does_not_block_the_exit(
    env: RankEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(flight, "write_whole", lambda path, data: answers.wait())
    dump_at_end(env, limit_s=0.1)
    assert list(tmp_path.iterdir()) == []
    answers.set()  # Let the thread end.


def test_missing_storage_raises_no_second_error(tmp_path: Path, env: RankEnv) -> None:
    dump_at_end(RankEnv(rank=3, trace_dir=str(tmp_path / "gone")))


def test_a_rank_that_never_imported_torch_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, RECORDER, raising=False)
    dump_at_end(RankEnv(rank=3, trace_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
