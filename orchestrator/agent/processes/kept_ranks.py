"""The ranks of one host, and the torchrun above them, that may outlive an attempt."""

import socket
from pathlib import Path

from msgspec.structs import replace

from orchestrator.agent.processes.fork_server_client import Running
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.messages.rank_messages import Datagram, RankStarted
from orchestrator.contract.messages.rank_orders import RankOrder, socket_path, to_bytes


class KeptRanks:
    def __init__(self, torchrun: Running, start: Start, agent: Path) -> None:
        """
        Args:
            start: the attempt for which the processes were started.
            agent: the socket of this agent.
        """
        self.torchrun, self.start, self.agent = torchrun, start, agent

    def can_join(self, start: Start) -> bool:
        """Whether the processes are there, and as many as the attempt needs."""
        fit = start.keep_ranks and start.ranks_per_host == self.start.ranks_per_host
        return fit and self.torchrun.ended is None

    def order(self, local_rank: int, order: RankOrder) -> None:
        """Raises OSError if the rank does not listen."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)  # a rank that is stopped must not stop its agent
            sock.sendto(to_bytes(order), str(socket_path(self.agent, local_rank)))

    def as_in(self, start: Start, datagram: Datagram) -> Datagram:
        """The report of a rank watcher, which knows only the attempt that it was started for, as
        one about `start`."""
        if not isinstance(datagram, RankExited | RankStarted):
            return datagram
        if datagram.attempt != self.start.attempt or start.attempt == self.start.attempt:
            return datagram
        local = datagram.rank - self.start.node_rank * self.start.ranks_per_host
        rank = start.node_rank * start.ranks_per_host + local
        return replace(datagram, attempt=start.attempt, rank=rank)

    async def end(self) -> None:
        """Kill torchrun, and with it its ranks. Returns when it has ended."""
        self.torchrun.kill()
        await self.torchrun.wait()
