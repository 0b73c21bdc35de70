"""How the ranks of a job agree: through the key-value store of torch.distributed.

The store is used and not a collective, because a collective would mix with those of the script if
it saves in a thread. The store is used and not the file system, because on NFS other hosts see a
new file up to a minute later.
"""

import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WARN_S = 30.0
"""After this wait a rank prints which ranks have not come."""
LONGER = 1.5
DECISION = "decision"
KEPT_DECISIONS = 10_000
"""Rank 0 makes one about once a second. No rank is so far behind it."""
MOST_NAMED = 8
"""Ranks in a message."""


class NotAgreed(RuntimeError):
    """Some ranks did not come, or the store is lost."""


class Ranks(NamedTuple):
    rank: int
    size: int
    store: Any
    """None: this is the only rank."""
    calls: Counter[str]
    """What -> how often the ranks agreed on it. Equal on all ranks, because all make the same
    calls."""

    def agree(
        self, what: str, mine: Any, decide: Callable[[list[Any]], Any], timeout_s: float, call: str
    ) -> Any:
        """Rank 0 decides from the values of all ranks; every rank returns its decision.

        Args:
            what: the same on all ranks, like the order of the calls.
            mine: the value of this rank, which JSON can represent, like the decision.
            call: what the user's script calls, for messages.

        Raises:
            NotAgreed: after `timeout_s` seconds some ranks have not come.
        """
        if self.store is None:
            return decide([mine])
        number = self.calls[what]
        self.calls[what] += 1
        prefix = f"ndctl/{what}/{number}"
        if self.rank != 0:
            self.store.set(f"{prefix}/{self.rank}", json.dumps(mine))
            key = f"{prefix}/{DECISION}"
            # Longer than rank 0, which knows the ranks that have not come.
            self._wait({0: key}, LONGER * timeout_s, call)
            return _decided(self.store.get(key))
        keys = {rank: f"{prefix}/{rank}" for rank in range(1, self.size)}
        try:
            self._wait(keys, timeout_s, call)
        except NotAgreed as exc:
            # The others must not wait for a decision that nobody makes.
            self._publish(prefix, {"failed": str(exc)})
            raise
        values = [json.loads(value) for value in self.store.multi_get(list(keys.values()))]
        decision = decide([mine, *values])
        self._publish(prefix, {"decision": decision})
        # All ranks have come, so all have read the decision before this one.
        for key in (*keys.values(), f"ndctl/{what}/{number - 1}/{DECISION}"):
            self.store.delete_key(key)
        return decision

    def leave(self, what: str, mine: Any, why: str) -> None:
        """Give the value of this rank, which does not wait for the decision. Raises RuntimeError if
        the store is lost."""
        if self.store is None:
            return
        prefix = f"ndctl/{what}/{self.calls[what]}"
        if self.rank == 0:
            self._publish(prefix, {"failed": why})
        else:
            self.store.set(f"{prefix}/{self.rank}", json.dumps(mine))

    def lead(
        self, what: str, number: int, decide: Callable[[], Any], timeout_s: float, call: str
    ) -> Any:
        """Every rank returns what rank 0 decides as decision `number` on `what`.

        Raises:
            NotAgreed: rank 0 did not decide within `timeout_s` seconds.
        """
        prefix = f"ndctl/{what}/{number}"
        if self.rank != 0:
            key = f"{prefix}/{DECISION}"
            self._wait({0: key}, timeout_s, call)
            return _decided(self.store.get(key))
        decision = decide()
        self._publish(prefix, {"decision": decision})
        if number >= KEPT_DECISIONS:
            self.store.delete_key(f"ndctl/{what}/{number - KEPT_DECISIONS}/{DECISION}")
        return decision

    def _publish(self, prefix: str, decision: dict[str, Any]) -> None:
        self.store.set(f"{prefix}/{DECISION}", json.dumps(decision))

    def _wait(self, keys: Mapping[int, str], timeout_s: float, call: str) -> None:
        """Wait until the store has `keys`, each of which a rank sets."""
        if not keys:
            return
        begun = time.monotonic()
        warned = False
        while True:
            left = begun + timeout_s - time.monotonic()
            # In slices, because Python handles signals only between them.
            limit_s = max(0.001, min(left, WARN_S))
            slice_begun = time.monotonic()
            try:
                self.store.wait(list(keys.values()), datetime.timedelta(seconds=limit_s))
            except RuntimeError as exc:
                waited = time.monotonic() - begun
                if time.monotonic() - slice_begun < limit_s / 2:
                    raise NotAgreed(f"{call} lost the store of torch.distributed: {exc}") from exc
                missing = _named([rank for rank, key in keys.items() if self._lacks(key)])
                if not missing:  # the last one has just come
                    return
                if waited >= timeout_s:
                    raise NotAgreed(
                        f"{call} waited {timeout_s:g} s for {missing}; every rank must make this"
                        " call, in the same order"
                    ) from None
                if not warned:
                    warned = True
                    sys.stderr.write(
                        f"ndctl: {call} has waited {waited:.0f} s for {missing}; every rank must"
                        " make this call\n"
                    )
            else:
                return

    def _lacks(self, key: str) -> bool:
        return not self.store.check([key])


def _decided(text: bytes) -> Any:
    body = json.loads(text)
    if "failed" in body:
        raise NotAgreed(body["failed"])
    return body["decision"]


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def group_of_script() -> Any:
    """The default process group of the script; None if it has none."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


_known: tuple[Any, Ranks] | None = None


def ranks_of_script(rank: int, size: int) -> Ranks | None:
    """The ranks that agree; None if there are several and the script has not initialised
    torch.distributed. `rank` and `size` are what the environment says."""
    global _known
    group = group_of_script()
    if group is None:
        return Ranks(rank, size, None, Counter()) if size == 1 else None
    if _known is None or _known[0] is not group:
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        # A connection of its own: a wait on the script's would block torch's threads.
        store = c10d._get_default_store().clone()
        _known = group, Ranks(group.rank(), group.size(), store, Counter())
    return _known[1]
