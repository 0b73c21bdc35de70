"""The secret of a job is in one file only, and in no command line, environment or other file."""

import base64
import hashlib
import hmac
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from orchestrator.job_secret import draw, secret_from
from tests.e2e.job import LONG_TIMEOUTS, Ndctl, assert_nothing_left, kill, processes_of, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(900),
]

HOSTS = ("host-0", "host-1")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder for the job's temporary files. Its path is short, because it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ndctl-secret-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def secret_forms(token: Path) -> tuple[bytes, ...]:
    """Byte strings that reveal the secret: the key and the keys derived for each host, each as
    bytes, hexadecimal and base64, and each line of the leader's private key."""
    secret = secret_from(token.read_text())
    derived = [hmac.digest(secret.key, f"ndctl host {host}".encode(), "sha256") for host in HOSTS]
    private = secret.pem.partition("-----BEGIN CERTIFICATE")[0]
    lines = [line.encode() for line in private.splitlines() if line and not line.startswith("---")]
    der = base64.b64decode(b"".join(lines))
    raw = [secret.key, *derived, der, hashlib.sha256(secret.key).digest()]
    padded = secret.key + b"=" * (-len(secret.key) % 4)
    raw.append(base64.urlsafe_b64decode(padded))
    encoded = [how(one) for one in raw for how in (bytes.hex, base64.b64encode)]
    return (*raw, *lines, *(one.encode() if isinstance(one, str) else one for one in encoded))


def files_with(secret: Iterable[bytes], folders: Iterable[Path]) -> list[Path]:
    """Files that contain any form of the secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    found = []
    for path in files:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # A renamed checkpoint or a temporary file.
            continue
        if any(one in content for one in secret):
            found.append(path)
    return found


def processes_with(secret: Iterable[bytes], pids: Iterable[int]) -> list[str]:
    """Processes whose command line or environment contains any form of the secret."""
    found = []
    for pid in pids:
        for name in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            if any(one in content for one in secret):
                found.append(f"{name} of {pid}")
    return found


def test_only_one_file_has_the_secret(ndctl: Ndctl, temporary: Path) -> None:
    more = {**LONG_TIMEOUTS, "train__steps": "16", "checkpoint__every_steps": "4"}
    assert ndctl.submit(**more).code == 0
    token = ndctl.run_dir / "token"
    wait_for(lambda: ndctl.num_steps() >= 5, "steps and a checkpoint")
    secret = secret_forms(token)
    folders = (ndctl.run_root, temporary)

    with ndctl.paused_ranks():
        commands = processes_of(ndctl.run_dir)
        kinds = " ".join(commands.values())
        assert all(
            re.search(kind, kinds)
            for kind in (r"orchestrator\.backends\.entry\.agent", r"\(rank 3\)")
        )
        assert processes_with(secret, commands) == []
        assert files_with(secret, folders) == [token]
        assert stat.S_IMODE(token.stat().st_mode) == 0o600

    # The evidence of a lost rank and the files of a second attempt do not contain it either.
    kill(ndctl.rank_pid(1))
    wait_for(lambda: len(ndctl.events("RankExited")) > 0, "the rank's end")
    assert ndctl("diagnose", "e2e").code in (0, 1)
    wait_for(ndctl.has_ended, "the job's end")
    assert_nothing_left(ndctl.run_dir)
    assert ndctl.num_steps() >= 16
    assert files_with(secret, folders) == [token]


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(draw())
    secret = secret_forms(token)
    key = secret_from(token.read_text()).key
    derived = hmac.digest(key, b"ndctl host host-1", "sha256").hex()
    waiting = [sys.executable, "-c", "input()"]
    for command, environ in (([*waiting, derived], {}), (waiting, {"KEY": key.decode()})):
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as process:
            # The command line of a process appears a moment after its start.
            found = wait_for(partial(processes_with, secret, [process.pid]), "its words", 30)
            assert len(found) == 1
    (tmp_path / "log").write_bytes(b"a line\0" + token.read_bytes().splitlines()[2])
    assert sorted(files_with(secret, [tmp_path])) == [tmp_path / "log", token]
    assert files_with(forms_of_other_secret(tmp_path), [tmp_path]) == [tmp_path / "another"]


def forms_of_other_secret(folder: Path) -> tuple[bytes, ...]:
    another = folder / "another"
    another.write_text(draw())
    return secret_forms(another)
