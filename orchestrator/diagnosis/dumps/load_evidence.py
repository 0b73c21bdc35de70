"""Loads evidence of a hang from files: flight recorder dumps and stacks, of ndctl or other tools.

    flight-3, nccl_trace_rank_3, _dump_3.json   dump of rank 3, pickle or JSON; also .gz
    rank-3.stacks, rank3.txt, rank-3.log        its stacks, as faulthandler or py-spy print them
    last-flight-3                               last calls of rank 3 of an ndctl job that raised
    host-node7.jsonl                            exits and last lines of ranks of an ndctl job

If a folder has no such files, its subfolders may have them, one per host and named after it.
Files that cannot be read, or are not used, are listed in the evidence with the reason.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.files.atomic_write import UNFINISHED
from orchestrator.contract.files.run_dir import LAST_FILES
from orchestrator.contract.read_json import read_json
from orchestrator.diagnosis.classes import FailureSigns, classify
from orchestrator.diagnosis.dumps.attempts import Candidate, as_of_one, newest
from orchestrator.diagnosis.dumps.dump import RankDump
from orchestrator.diagnosis.dumps.reader import Refused
from orchestrator.diagnosis.dumps.reader_client import read_dumps
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts
from orchestrator.diagnosis.stacks.python_stacks import main_stack

A_RANK = re.compile(r"[0-9]{1,9}")
NUMBER_AT_THE_END = r"(?<!\d)(\d{1,9})(?:\.[a-z][a-z\d]*)?$"
RANK = re.compile(rf"rank[-_]?(\d{{1,9}})(?![\da-z])|{NUMBER_AT_THE_END}", re.IGNORECASE)
OF_TORCH = re.compile(rf"trace_rank_.*?{NUMBER_AT_THE_END}", re.IGNORECASE)
"""torch writes the rank behind the path that the user gives. Some users end it with the name or
address of the host: `nccl_trace_rank_10.3.7.1_12` is of rank 12."""
OF_A_RANK = re.compile(r"rank[-_]?\d+", re.IGNORECASE)
PACKED = ".gz"
STACKS = (".stacks", ".stack", ".txt", ".pyspy")
LOGS = (".log", ".out", ".err")
"""Files that may contain stacks among other lines."""
ARCHIVES = (".zip", ".tar", ".tgz", ".zst", ".xz", ".bz2", ".7z")
NOT_EVIDENCE = (".md", ".yaml", ".jsonl", UNFINISHED)
TEXT_BYTES = 1 << 22
"""Number of last bytes of stacks or a log that are read: the last stacks count."""
LINE = 1_000
"""Number of characters of a line that are read."""
TAILS_BYTES = 1 << 26
"""Size limit of the file that an agent keeps about its host."""


@dataclass(slots=True)
class Files:
    """Evidence files in a folder."""

    dumps: list[tuple[int, Path]] = field(default_factory=list)
    last: list[tuple[int, Path]] = field(default_factory=list)
    stacks: list[tuple[int, Path]] = field(default_factory=list)
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self.dumps or self.last or self.stacks)

    def ranks(self) -> set[int]:
        return {rank for rank, _ in (*self.dumps, *self.last, *self.stacks)}

    def add(self, other: "Files") -> None:
        self.dumps += other.dumps
        self.last += other.last
        self.stacks += other.stacks
        self.passed_over |= other.passed_over


def read_folder(folder: Path, *, one_attempt: bool = False) -> HangEvidence:
    """All dumps and stacks of ranks in `folder`, or in one file.

    Of two dumps or stacks of a rank the one with more information is used, else the first. What
    ranks wrote when they ended belongs to other evidence (`read_last`).

    Args:
        one_attempt: all dumps are known to be of one attempt. Otherwise dumps of earlier attempts
            are skipped.
    """
    files = files_of(folder)
    if files.any or not folder.is_dir():
        found = _still(files, one_attempt)
        return with_facts(found, _ended(folder, found)) if folder.is_dir() else found
    inner, why_not = below(folder)
    found = _still(inner, one_attempt)
    hosts = _hosts([*inner.dumps, *inner.stacks])
    facts = {
        rank: replace(found.facts.get(rank, RankFacts(rank=rank)), host=hosts.get(rank))
        for rank in {*found.dumps, *found.facts}
    }
    passed_over = {**files.passed_over, **found.passed_over, **why_not}
    return replace(found, facts=facts, passed_over=passed_over)


def _ended(folder: Path, found: HangEvidence) -> dict[int, RankFacts]:
    """Ranks that had ended before their host was asked. Each rank of an ndctl job opens its file of
    stacks when it starts, so the empty file of such a rank does not mean that it gave no stack."""
    ended: dict[int, RankFacts] = {}
    for path in folder.glob("host-*.jsonl"):
        for rank, how in _kept_by_host(path, "ended").items():
            facts = found.facts.get(int(rank), RankFacts(rank=int(rank)))
            if not facts.stack and int(rank) not in found.dumps:
                ended[int(rank)] = replace(facts, asked=False, ended=str(how))
    return ended


def _still(files: Files, one_attempt: bool) -> HangEvidence:
    unreadable: dict[str, str] = {}
    passed_over = dict(files.passed_over)
    facts = _stacks(files.stacks, unreadable, passed_over)
    dumps = _dumps(files.dumps, unreadable, passed_over, one_attempt)
    return HangEvidence(dumps=dumps, facts=facts, unreadable=unreadable, passed_over=passed_over)


def below(folder: Path) -> tuple[Files, dict[str, str]]:
    """Evidence files in subfolders, and folders that are not used with the reason. Nothing is used
    if two folders have the same rank: they are of several attempts, or number ranks per host."""
    found = Files()
    refused: dict[str, str] = {}
    first: dict[int, str] = {}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            files = files_of(inner)
        except OSError as exc:  # such as lost+found of a file system
            refused[inner.name] = str(exc)
            continue
        for rank in sorted(files.ranks()):
            other = first.setdefault(rank, inner.name)
            if other != inner.name:
                why = f"rank {rank} is also in {other}: name one of the two folders"
                return Files(), {inner.name: why}
        found.add(files)
    return found, refused


def _hosts(files: Sequence[tuple[int, Path]]) -> dict[int, str]:
    """Rank -> host by folder name. A single folder, or one named after a rank, is not a host."""
    folders = {rank: path.parent.name for rank, path in files}
    if len(set(folders.values())) < 2 or any(OF_A_RANK.search(name) for name in folders.values()):
        return {}
    return folders


def read_last(folder: Path) -> HangEvidence:
    """Last calls of ranks that ended by an exception, as far as they wrote them."""
    unreadable: dict[str, str] = {}
    passed_over: dict[str, str] = {}
    files = files_of(folder)
    if not files.any and folder.is_dir():
        files = below(folder)[0]
    dumps = _dumps(files.last, unreadable, passed_over, one_attempt=True)
    return HangEvidence(dumps=dumps, unreadable=unreadable, passed_over=passed_over)


def ended_by_class(folder: Path, name: str) -> frozenset[int]:
    """Ranks whose last lines, as kept by their hosts, have this failure class."""
    found = set()
    for path in folder.glob("host-*.jsonl") if folder.is_dir() else ():
        for rank, lines in _kept_by_host(path, "log_tails").items():
            told = tuple(map(str, lines)) if isinstance(lines, list) else ()
            classified = classify(FailureSigns(lines=told))
            if classified is not None and classified.rule.name == name:
                found.add(int(rank))
    return frozenset(found)


def _kept_by_host(path: Path, name: str) -> Mapping[str, Any]:
    """Rank -> what its host kept about it. Empty if it cannot be read: it is useful but not
    essential."""
    try:
        text = _end_of(path, TAILS_BYTES).decode(errors="replace")
        kept = read_json(text)[name].items()
        return {rank: value for rank, value in kept if A_RANK.fullmatch(rank)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _dumps(
    files: Sequence[tuple[int, Path]],
    unreadable: dict[str, str],
    passed_over: dict[str, str],
    one_attempt: bool,
) -> Mapping[int, RankDump]:
    """Adds files that are not used to `unreadable` and `passed_over`."""
    candidates = []
    for (rank, path), found in zip(files, read_dumps(files), strict=True):
        if isinstance(found, Refused):
            unreadable[found.name] = found.why
        else:
            candidates.append(Candidate(rank, path.name, found.dump, found.times))
    dumps, why = as_of_one(candidates) if one_attempt else newest(candidates)
    passed_over |= why
    return dumps


def _stacks(
    files: Iterable[tuple[int, Path]], unreadable: dict[str, str], passed_over: dict[str, str]
) -> dict[int, RankFacts]:
    """Adds files that are not used to `unreadable` and `passed_over`."""
    facts: dict[int, RankFacts] = {}
    names: dict[int, str] = {}
    for rank, path in files:
        try:
            lines = lines_of(path)
        except OSError as exc:
            unreadable[path.name] = str(exc)
            continue
        tells = bool(main_stack(lines))
        if not tells and path.suffix in LOGS:
            passed_over[path.name] = "a log without a stack"
        elif rank in facts and (main_stack(facts[rank].stack) or not tells):
            passed_over[path.name] = f"second stacks of rank {rank}; {names[rank]} is used"
        else:
            if rank in facts:
                passed_over[names[rank]] = f"no stack of rank {rank}; {path.name} is used"
            facts[rank], names[rank] = RankFacts(rank=rank, asked=True, stack=lines), path.name
    return facts


def lines_of(path: Path) -> tuple[str, ...]:
    """The last lines of a text file. Raises OSError."""
    text = _end_of(path, TEXT_BYTES).decode(errors="replace")
    return tuple(line[:LINE] for line in text.splitlines())


def _end_of(path: Path, most: int) -> bytes:
    """Raises OSError, also for a pipe, because reading it could block."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        file.seek(max(0, found.st_size - most))
        return file.read(most)


def files_of(place: Path) -> Files:
    """Files in a folder whose names contain a rank, or the one file at `place`.

    Raises OSError if the folder cannot be read.
    """
    files = Files()
    if not place.is_dir():
        _sort_in(files, place, rank_of(place.name) or 0)
        return files
    with os.scandir(place) as entries:
        names = sorted((entry.name, _is_file(entry), _is_folder(entry)) for entry in entries)
    for name, is_file, is_folder in names:
        rank = None if name.endswith(NOT_EVIDENCE) else rank_of(name)
        if rank is None or is_folder:
            continue
        if is_file:
            _sort_in(files, place / name, rank)
        else:
            files.passed_over[name] = "not a regular file"
    return files


def _sort_in(files: Files, path: Path, rank: int) -> None:
    name = path.name.removesuffix(PACKED)
    is_packed = name != path.name
    kind = Path(name).suffix
    if kind in ARCHIVES or (is_packed and kind in (*STACKS, *LOGS)):
        files.passed_over[path.name] = "an archive: unpack it first"
    elif name.startswith(LAST_FILES):
        files.last.append((rank, path))
    elif kind in STACKS:
        files.stacks.insert(_before_logs(files), (rank, path))
    elif kind not in LOGS:
        files.dumps.append((rank, path))
    elif OF_A_RANK.search(name):
        files.stacks.append((rank, path))
    # The number of any other log is that of a job or a process.


def _before_logs(files: Files) -> int:
    """Puts files that were written for stacks before logs that happen to contain some."""
    return sum(path.suffix not in LOGS for _, path in files.stacks)


def _is_file(entry: "os.DirEntry[str]") -> bool:
    return _asked(entry.is_file)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return _asked(entry.is_dir)


def _asked(question: Callable[[], bool]) -> bool:
    """False for a symbolic link that points to itself."""
    try:
        return question()
    except OSError:
        return False


def rank_of(name: str) -> int | None:
    """The rank in a file name: the number after `rank`, else the number at its end."""
    bare = name.removesuffix(PACKED)
    if of_torch := OF_TORCH.search(bare):
        return int(of_torch[1])
    found = None
    for found in RANK.finditer(bare):
        if found[1]:
            break
    return None if found is None else int(found[1] or found[2])


def with_facts(scene: HangEvidence, facts: Mapping[int, RankFacts]) -> HangEvidence:
    """The evidence with other facts about ranks, which take precedence."""
    return replace(scene, facts={**scene.facts, **facts})
