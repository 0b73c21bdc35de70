"""Which checkpoints are complete, undamaged and kept."""

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ndctl.rank.checkpoint_files import MARKER, checksum, damage, superfluous
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint, newest_complete


def save(checkpoints: Path, step: int, data: bytes = b"shard") -> Path:
    folder = checkpoints / f"step-{step}"
    folder.mkdir()
    (folder / "0").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / MARKER).write_text(json.dumps({"files": {"0": len(data)}, "sha256": {"0": sha256}}))
    return folder


def test_a_checkpoint_known_to_be_damaged_is_skipped_with_its_reason(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert newest_complete(tmp_path, {"step-2": "0 is garbled"}) == (
        tmp_path / "step-1",
        (SkippedCheckpoint("step-2", "0 is garbled"),),
    )


def test_a_changed_byte_is_found_and_an_equal_file_passes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    known = {"0": checksum(folder / "0")}
    assert damage(folder, known, known) is None
    (folder / "0").write_bytes(b"sharf")
    assert damage(folder, known, known) == "0 has another checksum than its marker says"
    assert damage(folder, known, []) is None
    (folder / "0").unlink()
    assert damage(folder, known, known) == "0 cannot be read (No such file or directory)"


def test_the_newest_checkpoints_and_multiples_of_keep_every_stay() -> None:
    complete = range(10, 110, 10)
    assert superfluous(complete, 100, 2, None) == set(range(10, 90, 10))
    assert superfluous(complete, 100, 2, 40) == {10, 20, 30, 50, 60, 70}
    assert superfluous([10], 10, 2, None) == set()


def test_skipped_checkpoints_are_neither_counted_nor_deleted() -> None:
    """The job resumed from step 20 because step 90 was damaged."""
    assert superfluous([10, 20, 30, 80, 90], 30, 2, None) == {10}


@given(
    complete=st.sets(st.integers(1, 60)),
    step=st.integers(1, 60),
    keep=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 20),
)
def test_the_checkpoint_just_saved_always_stays(
    complete: set[int], step: int, keep: int, keep_every: int | None
) -> None:
    gone = superfluous(complete | {step}, step, keep, keep_every)
    left = {s for s in complete | {step} if s <= step} - gone
    assert step in left
    assert len(left) >= min(keep, len(left | gone))
    assert not any(keep_every and s % keep_every == 0 for s in gone)
