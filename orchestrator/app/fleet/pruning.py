"""`ndctl prune`: removes what old runs left on disk.

Only the user's own runs, only if they ended, and never a checkpoint unless the user asks for that.
A run with checkpoints stays listed and can be resumed: only logs, traces, profiles and copies of
programs and data are removed.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct

from orchestrator.app.fleet.known_jobs import KnownJob
from orchestrator.app.submission.submission_lock import submission_lock
from orchestrator.backends.kubernetes.mirror.mirror_paths import is_mirror
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.row import JobRow
from orchestrator.errors import JobError, NdctlError
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import DAMAGED, has_writer
from orchestrator.posix.locks import is_free
from orchestrator.registry.store import forget
from orchestrator.registry.submitted import user_name

BULKY = ("logs", "traces", "profiles", "tokens", "capture-*", "slurm", "snapshot")
"""What a run with checkpoints does not need: it can be resumed and described without."""


OF_NDCTL = (
    *BULKY,
    *("spec*.yaml", "submitted.json", "plan-*.json", "trainer-*.json", "trainer.lock"),
    *("journal.jsonl", DAMAGED, "state.json", "metrics.jsonl", "samples.jsonl", "imports.json"),
    *("launch.json", "leader.json", "fence.json", "report.json", "remote.json", "token"),
    *("checkpoints", "tensorboard", "wandb", "*.part"),
)
"""Everything that ndctl and its trainer write into a run directory."""


class Prunable(Struct, frozen=True, kw_only=True):
    row: JobRow
    path: Path
    whole: bool
    """Remove the run directory, and not only what is in `BULKY`."""
    kept: str
    """What stays, as text; empty if nothing does."""
    num_bytes: int


def prunable(
    jobs: Sequence[KnownJob],
    rows: Sequence[JobRow],
    older_than_s: float,
    now: float,
    *,
    checkpoints: bool,
) -> list[Prunable]:
    """What may be removed, oldest first. A run directory that is gone is only forgotten."""
    me, by_path = user_name(os.geteuid()), {str(job.path): job for job in jobs}
    found = []
    for row in sorted(rows, key=lambda row: row.at):
        old = row.state in (*ENDED, "GONE") and max(0.0, now - row.at) >= older_than_s
        if row.user == me and old and str(row.run_dir) in by_path:
            one = _look(row, Path(row.run_dir), checkpoints=checkpoints)
            if one is not None:
                found.append(one)
    return found


def _look(row: JobRow, path: Path, *, checkpoints: bool) -> Prunable | None:
    """None if nothing of it can be removed."""
    if row.gone:
        return Prunable(row=row, path=path, whole=True, kept="", num_bytes=0)
    if path.is_symlink() or _is_live(RunDir(path)):
        return None
    kept = "" if checkpoints else _kept(path)
    if kept:
        size = sum(size_of(one) for one in _bulky(path))
        if not size:
            return None
        return Prunable(row=row, path=path, whole=False, kept=kept, num_bytes=size)
    return Prunable(row=row, path=path, whole=True, kept="", num_bytes=size_of(path))


def _kept(path: Path) -> str:
    """Checkpoints, and files that only the user's program can have written."""
    saved = [one for one in _names(RunDir(path).checkpoints) if not one.endswith(".part")]
    other = [name for name in _names(path) if not _matches(name, OF_NDCTL)]
    kept = [format.count(len(saved), "checkpoint")] if saved else []
    return " and ".join(
        [*kept, *([f"what ndctl did not write: {', '.join(other)}"] if other else [])]
    )


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(one.name for one in entries)
    except FileNotFoundError:
        return []


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _bulky(path: Path) -> Iterator[Path]:
    for name in _names(path):
        if _matches(name, BULKY) and not (path / name).is_symlink():
            yield path / name


def _is_live(run_dir: RunDir) -> bool:
    """Whether a leader, an agent or a rank is left, whatever the journal says."""
    if has_writer(run_dir.journal):
        return True
    locks = (*run_dir.logs.glob("agent-*.lock"), *run_dir.logs.glob("ranks-*.lock"))
    return any(not is_free(path) for path in locks)


def size_of(path: Path) -> int:
    """Bytes of the files below, without following links."""
    total, folders = 0, [path]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for one in entries:
                    if one.is_dir(follow_symlinks=False):
                        folders.append(Path(one.path))
                    else:
                        total += one.stat(follow_symlinks=False).st_size
        except OSError:  # it was removed meanwhile, or is a file
            continue
    return total or (path.lstat().st_size if path.is_file() else 0)


def prune(
    found: Iterable[Prunable], environ: Mapping[str, str], say: Callable[[str], object]
) -> NdctlError | None:
    """Remove them. A run that cannot be removed does not stop the others; the error names all."""
    failed = []
    for one in found:
        try:
            _remove(one)
            if one.whole:
                forget(one.path, environ)
        except (OSError, NdctlError) as exc:
            why = exc.message if isinstance(exc, NdctlError) else str(exc)
            failed.append(f"{one.row.name}: {why}")
        else:
            say(f"removed {words_of(one)}")
    if not failed:
        return None
    return JobError(
        f"{len(failed)} of them could not be removed: {'; '.join(failed)}",
        fix="remove them by hand, or ask the owner of the files",
    )


def _remove(one: Prunable) -> None:
    if one.row.gone:
        return
    with _locked(one):
        # Again under the lock: it may have been resumed while the user read the question.
        if _is_live(RunDir(one.path)):
            raise JobError("it runs again")
        if not one.whole:
            for path in _bulky(one.path):
                _remove_tree(path)
            return
        # The journal last: if this is interrupted, the run is still listed and can be pruned again.
        with os.scandir(one.path) as entries:
            paths = [Path(entry.path) for entry in entries]
        for path in sorted(paths, key=lambda path: path.name == "journal.jsonl"):
            _remove_tree(path)
        one.path.rmdir()


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(one: Prunable) -> Iterator[None]:
    """An archived run cannot be submitted again, so it needs no lock."""
    with nullcontext() if one.row.archived else submission_lock(RunDir(one.path)):
        yield


def words_of(one: Prunable) -> str:
    if one.row.gone:
        return f"{one.row.name}: its entry, because {one.path} does not exist"
    if not one.whole:
        return f"{one.row.name}: logs, traces and copies in {one.path}; kept: {one.kept}"
    elsewhere = ", the copy on this machine" if is_mirror(one.path) else ""
    return f"{one.row.name}: {one.path}{elsewhere}"
