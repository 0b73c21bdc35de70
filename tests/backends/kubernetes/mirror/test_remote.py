"""`remote.json` of a mirror."""

from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.mirror.mirror_paths import REMOTE, folder_of
from orchestrator.backends.kubernetes.mirror.remote import Remote, read_remote, write_remote
from orchestrator.errors import JobError

WRITTEN = Remote(
    context="prod",
    namespace="ml",
    kind="pytorchjob",
    job="llm",
    run_dir="/runs/llm",
    python="/usr/bin/python3",
    launch=2,
    journal=70,
    led_at=1.5,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_remote(tmp_path, WRITTEN)
    assert read_remote(tmp_path) == WRITTEN


@pytest.mark.parametrize("text", [b"", b'{"context": "pr', b"[]", b'{"context": 3}', b"\xff\x00"])
def test_a_damaged_file_is_told_with_what_to_type(tmp_path: Path, text: bytes) -> None:
    mirror = folder_of(tmp_path / "it's", "arn:aws/prod", "ml", "llm")
    mirror.mkdir(parents=True)
    (mirror / REMOTE).write_bytes(text)
    with pytest.raises(JobError, match="so this copy of a job cannot be used") as told:
        read_remote(mirror)
    assert "\"'\"'" in told.value.fix, "the shell gets the folder as one word"
    again = "`ndctl status llm --backend kubernetes --context arn:aws/prod --namespace ml`"
    assert again in told.value.fix
