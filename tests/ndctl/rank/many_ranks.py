"""Several ranks as threads of one process, which agree through a real store of torch."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore

from ndctl.rank.agreement import Ranks
from ndctl.rank.fence import admit_all
from ndctl.rank.link import Link
from ndctl.rank.place import Place
from ndctl.rank.saving import Save


class World:
    """Ranks whose counters live as long as their processes would."""

    def __init__(self, size: int) -> None:
        store = HashStore()
        self.ranks = [Ranks(rank, size, store, Counter()) for rank in range(size)]

    def together(self, work: Callable[[Ranks], Any]) -> list[Any]:
        """What `work` returned or raised on each rank."""
        results: list[Any] = [None] * len(self.ranks)

        def run(ranks: Ranks) -> None:
            try:
                results[ranks.rank] = work(ranks)
            except BaseException as exc:  # noqa: BLE001 - the test looks at it
                results[ranks.rank] = exc

        threads = [threading.Thread(target=run, args=(ranks,)) for ranks in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


def place_in(folder: Path, **changes: Any) -> Place:
    keep: dict[str, Any] = {"keep": 2, "keep_every": None, "verify": True, "resume": True}
    return Place(run_dir=folder, **{**keep, "admit": admit_all, **changes})


@contextmanager
def saving(ranks: Ranks, place: Place, step: int, timeout_s: float = 20.0) -> Iterator[Path]:
    link = Link({"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)})
    yield from Save(step, ranks, link, place, timeout_s).run()
