"""`python -m trainer.data`, in this process and as a separate process."""

import io
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ndctl.rank.checkpoint_files import MARKER
from orchestrator.contract.files import exit_codes
from tests.agent.world import WAIT_S
from tests.trainer.data.data_files import text_of, write_rows, write_texts
from tests.trainer.data.test_ledger import another_hash, change, write
from trainer.data.__main__ import SHOW_LIVE_S, main, progress_printer
from trainer.data.packing.pack import Progress
from trainer.data.tokens import TokenFile

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(arguments, out, err), out.getvalue(), err.getvalue()


def test_pack_makes_a_token_file(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"q": "why", "a": "so"}])
    out = tmp_path / "new" / "x.tokens"
    files = ("--files", rows, "--column", "a", "--prompt-column", "q", "--format", "jsonl")
    code, said, _ = run("pack", *files, "--out", str(out))
    assert code == exit_codes.OK
    assert f"{out}: 1 documents, 6 tokens (uint8, bytes)" in said
    file = TokenFile(str(out))
    assert text_of(file) == b"whyso\0"
    assert file.learned(0, 6).tolist() == [False] * 3 + [True] * 3


def test_pack_refuses_with_an_error_and_a_fix(tmp_path: Path) -> None:
    files = write_texts(tmp_path / "texts", "abc")
    code, _, said = run("pack", "--files", files, "--out", str(tmp_path / "x.bin"))
    assert (code, "must end in .tokens" in said, "fix: --out" in said) == (
        exit_codes.REFUSED,
        True,
        True,
    )
    out = str(tmp_path / "x.tokens")
    assert run("pack", "--files", files, "--out", out)[0] == exit_codes.OK
    code, _, said = run("pack", "--files", out, "--out", str(tmp_path / "y.tokens"))
    assert (code, "matches token files" in said) == (exit_codes.REFUSED, True)
    code, _, said = run("pack", "--files", str(tmp_path / "none"), "--out", out)
    assert (code, "--files" in said) == (exit_codes.REFUSED, True)


def test_help_names_every_option() -> None:
    asked = [sys.executable, "-m", "trainer.data", "pack", "--help"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for option in ("files", "format", "column", "prompt-column", "tokenizer", "out"):
        assert f"--{option} " in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_progress_in_one_line() -> None:
    terminal, log = Terminal(), io.StringIO()
    times = iter((0.0, 0.0, 2 * SHOW_LIVE_S, 2 * SHOW_LIVE_S, 2.1 * SHOW_LIVE_S, 2.1 * SHOW_LIVE_S))
    shows = [
        progress_printer(terminal, lambda: next(times)),
        progress_printer(log, lambda: next(times)),
    ]
    for show in shows:
        show(Progress(0.25, 1000))
        show(Progress(0.5, 2000))
    assert terminal.getvalue().startswith("\r 25.0%  1000 tokens")
    assert terminal.getvalue().count("tokens/s") == 1
    assert log.getvalue() == ""


@pytest.mark.process
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size replaces a full disk: a write fails in the same way."""
    files = write_texts(tmp_path / "texts", "x" * (1 << 20))
    out = tmp_path / "out" / "x.tokens"
    ended = subprocess.run(
        [sys.executable, "-m", "trainer.data", "pack", "--files", files, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19)),
    )
    assert ended.returncode == exit_codes.REFUSED
    assert f"error: failed to write {out}: File too large" in ended.stderr
    assert [*out.parent.iterdir()] == []


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_pack_removes_its_unfinished_file(
    tmp_path: Path, signum: signal.Signals
) -> None:
    rows = tmp_path / "long.jsonl"
    rows.write_bytes((b'{"text": "' + b"x" * 50 + b'"}\n') * 1_000_000)
    out = tmp_path / "out" / "x.tokens"
    packing = subprocess.Popen(
        [sys.executable, "-m", "trainer.data", "pack", "--files", str(rows), "--out", str(out)],
        cwd=ROOT,
    )
    while not (out.parent.exists() and [*out.parent.iterdir()]):
        assert packing.poll() is None
        time.sleep(0.01)
    packing.send_signal(signum)
    assert packing.wait(WAIT_S) in (128 + signal.SIGTERM, exit_codes.INTERRUPTED)
    assert [*out.parent.iterdir()] == []


def test_ledger_reports_success_or_the_wrong_step(tmp_path: Path) -> None:
    ledger = tmp_path / "samples.jsonl"
    write(ledger, 1, range(1, 6))
    code, said, _ = run("ledger", str(tmp_path))
    assert code == exit_codes.OK
    assert "each of the 5 valid steps (from 1 starts) read exactly its 6 samples: 30" in said
    change(ledger, 4, another_hash)
    code, said, _ = run("ledger", str(tmp_path))
    assert code == exit_codes.FAILED
    assert "step 4: it read wrong samples in attempt 1" in said


def test_ledger_reads_the_last_step_from_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "samples.jsonl", 1, range(1, 6))
    folder = tmp_path / "checkpoints" / "step-7"
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"step": 7, "files": {}}))
    assert run("ledger", str(tmp_path))[:2] == (
        exit_codes.FAILED,
        f"{tmp_path / 'samples.jsonl'}: step 6: the ledger has no line for it\n",
    )


def test_ledger_refuses_a_folder_without_a_ledger(tmp_path: Path) -> None:
    code, _, said = run("ledger", str(tmp_path))
    assert (code, f"failed to read {tmp_path / 'samples.jsonl'}: No such file" in said) == (
        exit_codes.REFUSED,
        True,
    )
    (tmp_path / "samples.jsonl").write_text("torn")
    assert run("ledger", str(tmp_path))[0] == exit_codes.FAILED
