"""What `ndctl` outside asks of a pod of the job: what the run directory has gained.

    python -m orchestrator.backends.kubernetes.mirror.fetch RUN_DIR JOURNAL_OFFSET METRICS_OFFSET

Answers with a line of JSON (`News`), then as many bytes of journal, snapshot and metrics as that
says. What is too much for one answer comes with the next ones.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.read_json import read_json
from orchestrator.journal import snapshot
from orchestrator.journal.journal import complete_length, has_writer, mark

MOST_JOURNAL = 16 << 20
"""Of one answer: a journal of weeks has hundreds of megabytes."""
MOST_METRICS = 4 << 20
"""Of a long job, the newest metrics will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    launch: int
    """The newest that the journal has; 0 without one."""
    led: bool
    """Some process writes the journal."""
    journal: int
    """Bytes of it that follow."""
    more: bool
    """The journal has more whole lines than these."""
    state: int
    """Bytes of the leader's snapshot, where it knows more than who asks had, and no more than it
    has now."""
    metrics: int
    metrics_from: int
    """Where in the file they begin."""


def news(run_dir: RunDir, journal_offset: int, metrics_offset: int) -> tuple[News, bytes]:
    """An offset beyond the end of a file is of another run: then it is told from its beginning."""
    led = has_writer(run_dir.journal)  # before the journal is read, which a leader ends
    journal, first = _since(run_dir.journal, journal_offset, MOST_JOURNAL)
    last = first + len(journal)
    head = snapshot.read_head(run_dir)
    is_new = head is not None and first < head.place.offset <= last
    state = run_dir.state.read_bytes() if is_new else b""
    metrics, begun = _since(run_dir.metrics, metrics_offset)
    if len(metrics) > MOST_METRICS:
        cut = metrics.index(b"\n", len(metrics) - MOST_METRICS - 1) + 1
        metrics, begun = metrics[cut:], begun + cut
    told = News(
        launch=newest_launch(run_dir, head),
        led=led,
        journal=len(journal),
        more=len(journal) > 0 and _since(run_dir.journal, last, MOST_JOURNAL)[0] != b"",
        state=len(state),
        metrics=len(metrics),
        metrics_from=begun,
    )
    return told, journal + state + metrics


def newest_launch(run_dir: RunDir, head: snapshot.Head | None) -> int:
    """`head`: of the snapshot, before which nothing need be looked at."""
    with contextlib.suppress(FileNotFoundError), run_dir.journal.open("rb") as file:
        file.seek(head.place.offset if head else 0)
        data = file.read()
        at = data.rfind(mark(JobSubmitted))
        if at >= 0:
            line = data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
            with contextlib.suppress(ValueError):
                return int(read_json(line)["event"]["launch"]["launch"])
    return head.launch if head else 0


def _since(path: Path, offset: int, most: int = -1) -> tuple[bytes, int]:
    """Whole lines alone, and where they begin."""
    try:
        with path.open("rb") as file:
            begun = file.seek(offset if offset <= path.stat().st_size else 0)
            data = file.read(most)
    except FileNotFoundError:
        return b"", 0
    return data[: complete_length(data)], begun


def main(argv: Sequence[str], out: BinaryIO) -> None:
    told, body = news(RunDir(Path(argv[0])), int(argv[1]), int(argv[2]))
    out.write(json.dumps(encode(told)).encode() + b"\n" + body)
    out.flush()


def read_news(answer: bytes) -> tuple[News, bytes, bytes, bytes]:
    """What `main` wrote: the news, the bytes of journal, snapshot, metrics. Raises ValueError."""
    head, _, body = answer.partition(b"\n")
    told: News = decode(News, read_json(head))
    if len(body) != told.journal + told.state + told.metrics:
        raise ValueError("the answer is incomplete")
    state = told.journal + told.state
    return told, body[: told.journal], body[told.journal : state], body[state:]


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout.buffer)
