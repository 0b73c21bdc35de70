"""Runs in a pod of the job and prints what is new in the run directory, for `ndctl` outside.

    python -m orchestrator.backends.kubernetes.mirror.fetch RUN_DIR JOURNAL_OFFSET METRICS_OFFSET

It prints one line of JSON (`News`), then the bytes of journal, snapshot and metrics. A large amount
is split over several calls.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.read_json import read_json
from orchestrator.journal import snapshot
from orchestrator.journal.journal import complete_length, has_writer, mark

MOST_JOURNAL = 16 << 20
"""Limit of one answer, because the journal of a long job has hundreds of megabytes."""
MOST_METRICS = 4 << 20
"""Limit of one answer; older metrics are skipped."""


class News(Struct, frozen=True, kw_only=True):
    launch: int
    """The newest launch in the journal; 0 without one."""
    led: bool
    """A process is writing the journal: the leader is alive."""
    journal: int
    """Bytes of the journal in this answer."""
    more: bool
    """The journal has further whole lines."""
    state: int
    """Bytes of the leader's snapshot in this answer; 0 unless it is newer than the requester's
    journal and not newer than the journal after this answer."""
    metrics: int
    metrics_from: int
    """Offset of the metrics in the file."""


def news(run_dir: RunDir, journal_offset: int, metrics_offset: int) -> tuple[News, bytes]:
    """What is new after the offsets. An offset beyond the end of a file belongs to another run;
    then the file is sent from its start."""
    led = has_writer(run_dir.journal)  # before the read, so that a leader's last lines are included
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
    """The newest launch in the journal. The part before the snapshot `head` need not be read."""
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
    """The whole lines after `offset`, and the offset where they begin."""
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
    """Parses the output of `main`: news, journal, snapshot, metrics.

    Raises:
        ValueError: the output is incomplete.
    """
    head, _, body = answer.partition(b"\n")
    told: News = decode(News, read_json(head))
    if len(body) != told.journal + told.state + told.metrics:
        raise ValueError("the answer is incomplete")
    state = told.journal + told.state
    return told, body[: told.journal], body[told.journal : state], body[state:]


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout.buffer)
