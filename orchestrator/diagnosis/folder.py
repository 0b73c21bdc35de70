"""Evidence from files: dumps of flight recorders and stacks, whoever wrote them.

    flight-3, nccl_trace_rank_3, trace_3.json   the dump of rank 3, pickle or JSON
    rank-3.stacks, rank3.txt                    its stacks, as faulthandler or py-spy print them
    last-flight-3                               what rank 3 of ours had called when it ended
    host-node7.jsonl                            how ranks of ours ended, with their last lines

A folder without any may have one of each host below it, whose name is then the host's.
A file that cannot be read is named in the scene, and hinders nothing.
"""

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.contract.read_json import read_json
from orchestrator.contract.rundir import LAST_FILES
from orchestrator.contract.whole import UNFINISHED
from orchestrator.diagnosis.classes import Signs, classify
from orchestrator.diagnosis.dumps import (
    HISTORY,
    RankDump,
    Seat,
    Unreadable,
    condense,
    parse,
)
from orchestrator.diagnosis.facts import RankFacts, Scene
from orchestrator.diagnosis.stacks import main_stack

RANK = re.compile(r"rank[-_]?(\d+)|(\d+)(?:\.\w+)?$")
OF_A_RANK = re.compile(r"rank[-_]?\d+", re.IGNORECASE)
STACKS = (".stacks", ".stack", ".txt", ".pyspy")
PASSED_OVER = (".log", ".gz", ".md", ".yaml", ".jsonl", UNFINISHED)
MOST_BYTES = 1 << 28
"""A dump of 2,000 operations with stacks has less than a hundredth of this."""
MANY = 2_000
"""From so many files on they are read by several processes, and little history is kept."""
BATCH = 500


def read_folder(folder: Path) -> Scene:
    """All dumps and stacks in `folder`; of two dumps, or stacks, of one rank the one that tells
    more, which is the first where they tell the same. Of ranks that stood still: what others wrote
    as they ended is another scene."""
    scene = _still(_ranked(folder))
    if scene.dumps or scene.facts or any(_is_last(path) for _, path in _ranked(folder)):
        return scene
    below, why_not = _below(folder)
    found = _still(below)
    hosts = _hosts(below)
    facts = {
        rank: replace(found.facts.get(rank, RankFacts(rank=rank)), host=hosts.get(rank))
        for rank in {*found.dumps, *found.facts}
    }
    unreadable = {**scene.unreadable, **found.unreadable, **why_not}
    return replace(found, facts=facts, unreadable=unreadable)


def _still(files: Sequence[tuple[int, Path]]) -> Scene:
    unreadable: dict[str, str] = {}
    flights: list[tuple[int, Path]] = []
    stacks: list[tuple[int, Path]] = []
    for rank, path in files:
        if not _is_last(path):
            (stacks if path.suffix in STACKS else flights).append((rank, path))
    facts = _stacks(stacks, unreadable)
    return Scene(dumps=_dumps(flights, unreadable), facts=facts, unreadable=unreadable)


def _below(folder: Path) -> tuple[list[tuple[int, Path]], dict[str, str]]:
    """What lies in folders below, and why that of some is not taken; nothing is, where two have the
    same ranks: they are of several attempts, or number ranks within their host."""
    found: list[tuple[int, Path]] = []
    unreadable: dict[str, str] = {}
    first: dict[int, str] = {}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        try:
            files = _ranked(inner)
        except OSError as exc:  # as lost+found of a file system
            unreadable[inner.name] = str(exc)
            continue
        for rank, path in files:
            other = first.setdefault(rank, inner.name)
            if other != inner.name:
                return [], {inner.name: f"rank {rank} is in {other} as well: name one of them"}
            found.append((rank, path))
    return found, unreadable


def _hosts(files: Sequence[tuple[int, Path]]) -> dict[int, str]:
    """By folder; one alone, or one that is named after a rank, is no host's."""
    folders = {rank: path.parent.name for rank, path in files}
    if len(set(folders.values())) < 2 or any(OF_A_RANK.search(name) for name in folders.values()):
        return {}
    return folders


def read_last(folder: Path) -> Scene:
    """What ranks that ended by an exception had called, as far as they wrote it."""
    unreadable: dict[str, str] = {}
    flights = [
        (rank, path) for rank, path in _ranked(folder) or _below(folder)[0] if _is_last(path)
    ]
    return Scene(dumps=_dumps(flights, unreadable), unreadable=unreadable)


def ended_by_class(folder: Path, name: str) -> frozenset[int]:
    """Ranks whose last lines, as their hosts kept them, have that class of failure."""
    found = set()
    for path in folder.glob("host-*.jsonl"):
        for rank, lines in _log_tails(path).items():
            classified = classify(Signs(lines=tuple(map(str, lines))))
            if classified is not None and classified.rule.name == name:
                found.add(int(rank))
    return frozenset(found)


def _log_tails(path: Path) -> Mapping[str, list[Any]]:
    """Nothing hangs on them: none where they cannot be read."""
    try:
        tails = read_json(path.read_text(errors="replace"))["log_tails"].items()
        return {
            rank: lines for rank, lines in tails if rank.isdecimal() and isinstance(lines, list)
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _dumps(flights: Sequence[tuple[int, Path]], unreadable: dict[str, str]) -> dict[int, RankDump]:
    """Adds to `unreadable` what is not taken."""
    dumps: dict[int, RankDump] = {}
    names: dict[int, str] = {}
    for (rank, path), found in zip(flights, _read_all(flights), strict=True):
        if not isinstance(found, RankDump):
            unreadable[found[0]] = found[1]
            continue
        known, name = dumps.get(rank), path.name
        if known is not None and (known.seats or known.talks or not (found.seats or found.talks)):
            unreadable[name] = f"a second dump of rank {rank}; {names[rank]} is taken"
            continue
        if known is not None:
            unreadable[names[rank]] = f"a second dump of rank {rank}, and empty; {name} is taken"
        dumps[rank], names[rank] = found, name
    return dumps


def _stacks(files: Iterable[tuple[int, Path]], unreadable: dict[str, str]) -> dict[int, RankFacts]:
    """Adds to `unreadable` what is not taken."""
    facts: dict[int, RankFacts] = {}
    names: dict[int, str] = {}
    for rank, path in files:
        try:
            lines = tuple(path.read_text(errors="replace").splitlines())
        except OSError as exc:
            unreadable[path.name] = str(exc)
            continue
        if rank in facts and (main_stack(facts[rank].stack) or not main_stack(lines)):
            unreadable[path.name] = f"second stacks of rank {rank}; {names[rank]} is taken"
            continue
        if rank in facts:
            unreadable[names[rank]] = f"no stack of rank {rank}; {path.name} is taken"
        facts[rank], names[rank] = RankFacts(rank=rank, asked=True, stack=lines), path.name
    return facts


def _ranked(folder: Path) -> list[tuple[int, Path]]:
    """Files that have a rank in their name, with it."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_file() and not e.name.endswith(PASSED_OVER)]
    ranks = ((rank_of(name), folder / name) for name in sorted(names))
    return [(rank, path) for rank, path in ranks if rank is not None]


def _is_last(path: Path) -> bool:
    return path.name.startswith(LAST_FILES)


def rank_of(name: str) -> int | None:
    """The rank in a file's name: after `rank`, else the number at its end."""
    found = None
    for found in RANK.finditer(name):
        if found[1]:
            break
    return None if found is None else int(found[1] or found[2])


Found = RankDump | tuple[str, str]
"""A dump, or a file and why it could not be read."""


def _read_all(flights: Sequence[tuple[int, Path]]) -> Iterator[Found]:
    if len(flights) < MANY:
        yield from shared(_read(flights, HISTORY))
        return
    batches = [flights[i : i + BATCH] for i in range(0, len(flights), BATCH)]
    # Dumps hold no cycles, and there are many of them: nothing is to be collected.
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), initializer=gc.disable) as pool:
        found = (one for batch in pool.map(_read_batch, batches) for one in batch)
        yield from shared(found)


def _read_batch(flights: Sequence[tuple[int, Path]]) -> list[Found]:
    """Shared here already: what goes to the other process is then small."""
    return list(shared(_read(flights, 2)))


def _read(flights: Sequence[tuple[int, Path]], history: int) -> Iterator[Found]:
    return (read_dump(rank, path, history) for rank, path in flights)


def shared(found: Iterable[Found]) -> Iterator[Found]:
    """The same, with what is equal in dumps held once: of 100,000 that is most of the memory."""
    held: dict[Any, Any] = {}

    def same(value: Any) -> Any:
        return held.setdefault(value, value)

    for one in found:
        if isinstance(one, RankDump):
            one.paths = same(one.paths)
            one.seats = {same(group): _same_seat(seat, same) for group, seat in one.seats.items()}
        yield one


def _same_seat(seat: Seat, same: Callable[[Any], Any]) -> Any:
    calls = tuple(same(call._replace(op=same(call.op))) for call in seat.calls)
    return same(seat._replace(calls=same(calls)))


def read_dump(rank: int, path: Path, history: int = HISTORY) -> Found:
    """One rank's dump, reduced."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise Unreadable(f"larger than {MOST_BYTES >> 20} MiB")
        return condense(rank, parse(path.read_bytes()), history)
    except (OSError, Unreadable) as exc:
        return path.name, str(exc)


def with_facts(scene: Scene, facts: Mapping[int, RankFacts]) -> Scene:
    """What else is known of ranks, laid over what the folder says of them."""
    return replace(scene, facts={**scene.facts, **facts})
