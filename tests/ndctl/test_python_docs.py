"""The code of docs/python.md runs, in its order, and prints what the document says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import ndctl
from tests.e2e.job import assert_nothing_left

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
    (ROOT / "docs" / "python.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
TRAIN = """
import argparse, time
import ndctl
options = argparse.ArgumentParser()
options.add_argument("--lr", type=float, default=0.1)
options.add_argument("--sleep", type=float, default=0)
given = options.parse_args()
for step in range(1, 6):
    ndctl.log(step, loss=1 / step, lr=given.lr)
time.sleep(given.sleep)
print("done")
"""


@pytest.mark.process
def test_the_code_prints_what_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NDCTL_RUN_ROOT", raising=False)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {}
    try:
        for code, said in BLOCKS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "docs/python.md", "exec"), names)
            shape = ".*".join(map(re.escape, said.split("…")))
            assert re.fullmatch(shape, out.getvalue(), re.DOTALL), out.getvalue()
    finally:
        for job in ndctl.jobs():
            if not job.status().ended:
                job.cancel()
            assert_nothing_left(job.run_dir)
    assert len(BLOCKS) >= 7


def test_every_public_name_is_in_a_document() -> None:
    text = "".join((ROOT / "docs" / f"{one}.md").read_text() for one in ("python", "own_scripts"))
    assert [name for name in ndctl.__all__ if not re.search(rf"\b{name}\b", text)] == []
