"""Ranks wait for a task of rank 0 at the start. If one rank fails, all fail."""

from pathlib import Path

import pytest

from tests.trainer.data.data_files import packed, write_texts
from tests.trainer.launch.tiny_runs import work


@pytest.mark.process
def test_ranks_wait_for_the_first_and_fail_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        texts = write_texts(tmp_path / "texts", f"text of host {rank}")
        (tmp_path / str(rank)).mkdir()
        packed(texts, tmp_path / str(rank) / "x.tokens")
    worker = "tests.trainer.data.rank0_task_worker"
    (seen,) = work(tmp_path, 2, [{"folder": str(tmp_path)}], worker=worker)
    assert seen[0] == seen[1]
    assert seen[0]["answer"] == "done"
    # One beat for each report of progress, and none during the pause.
    assert seen[0]["beats"] == ["init"] * 3
    assert seen[0]["refused"] == "no data"
    assert seen[0]["same"] == ""
    other = tmp_path / "1" / "x.tokens"
    assert seen[0]["other"] == f"{other} on this host differs from the file on the first host"
    assert seen[0]["missing"].startswith("failed to open the token file nowhere")
