"""Copies the logs of a host's ranks to standard output, so that `kubectl logs` shows them."""

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from orchestrator.contract.files.run_dir import RunDir

LOOK_S = 0.5


class LogForwarder:
    """While it is entered, copies complete lines, each prefixed with host and rank.

    It skips lines that exist when it is created: an earlier agent of this host copied them.
    """

    def __init__(self, run_dir: RunDir, host: str, out: TextIO) -> None:
        self.run_dir = run_dir
        self.host = host
        self.out = out
        self.offsets: dict[Path, int] = {path: path.stat().st_size for path in self._files()}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._loop, name="log-forwarder", daemon=True)

    def _files(self) -> list[Path]:
        return sorted(self.run_dir.logs.glob(f"attempt-*/{self.host}/*.log"))

    def _loop(self) -> None:
        while not self.over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Copy the new lines. A log that cannot be read now is read again the next time."""
        for path in self._files():
            before = self.offsets.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(before)
                    data = file.read()
            except OSError:
                continue
            whole = data[: data.rfind(b"\n") + 1]  # the last line may still be written
            self.offsets[path] = before + len(whole)
            if whole:
                prefix = f"[{self.host} {label(path)}] "
                text = whole.decode(errors="replace").removesuffix("\n")
                self.out.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))
        self.out.flush()

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join()
        # Lines that the ranks wrote just before their end would be lost otherwise.
        self.look()


def label(path: Path) -> str:
    """`attempt 2 rank 3` or `attempt 2 torchrun`. `ndctl logs` parses this."""
    attempt = path.parent.parent.name.replace("-", " ")
    rank = re.fullmatch(r"rank-(\d+)", path.stem)
    return f"{attempt} {'rank ' + rank[1] if rank else path.stem}"
