"""The run directory as the real leader and agent use it, in the simulated shared storage."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.contract.files.fence import Fence, GivenUp
from orchestrator.contract.files.leader_file import Term
from orchestrator.failover.run_dir_watch import Loss
from orchestrator.host_strikes import Strike
from orchestrator.journal.supervisor import Folded
from orchestrator.leader.storage import Watch
from orchestrator.simulation.world.storage import StoredJournal, Whereabouts

if TYPE_CHECKING:
    from orchestrator.simulation.real.process import AgentProcess


class NeverLost:
    """No fault of a scenario removes the run directory."""

    lost: Loss | None = None

    def look(self) -> None:
        pass


class StoredRunDir:
    """An `AgentStorage` and a `LeaderStorage`."""

    def __init__(self, process: "AgentProcess") -> None:
        self.process = process
        self.storage = process.world.storage
        self.host = process.host.name
        self.watch: Watch = NeverLost()
        self.journal: StoredJournal | None = None
        """Of a leader."""

    def leader_of(self, term: Term) -> Mapping[str, Any]:
        said = self.storage.announced() if self.storage.serves(self.host) else None
        if said is None or (said.launch, said.restarts) != (term.launch, term.restarts):
            return {}
        if said.over:
            return {"over": True}
        leader = self.process.world.leaders.get(said.leader)
        return {} if leader is None else {"address": leader.host.name, "port": said.port}

    def leader_holds_journal(self) -> bool:
        if not self.storage.serves(self.host):
            raise OSError("the server does not answer")
        return not self.process.world.lock_is_free

    def check_leader(self, name: str) -> None:
        if not self.storage.serves(self.host):
            raise OSError("the server does not answer")
        now = self.storage.fence
        if now is not None and now.leader != name:
            raise GivenUp("another leader has taken over")

    def write_fence(self, fence: Fence) -> None:
        world = self.process.world
        self.storage.check_write(self.host)
        assert self.process.leader is not None
        world.witness.fence_raised(cast(Any, self.process.leader))
        if world.fenced:
            self.storage.fence = fence

    def announce(self, term: Term, address: str, port: int, name: str) -> None:
        self._announce(term, port=port)

    def announce_end(self, term: Term) -> None:
        self._announce(term, over=True)

    def _announce(self, term: Term, *, port: int = 0, over: bool = False) -> None:
        self.storage.check_write(self.host)
        said = Whereabouts(term.launch, term.restarts, self.process.incarnation, over, port)
        self.storage.whereabouts.append((self.process.world.timeline.now, said))

    def write_snapshot(self, folded: Folded, guard: Callable[[], None]) -> None:
        assert self.journal is not None
        self.journal.remember(folded)

    def write_trace(self, attempt: int, name: str, data: bytes) -> None:
        pass

    def record_strike(self, path: Path, strike: Strike) -> None:
        self.process.world.strikes.append(strike)
