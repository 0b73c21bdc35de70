"""The files of the run directory that an agent reads: an interface, and its real implementation."""

from collections.abc import Mapping
from typing import Any, Protocol

from orchestrator.contract.files.leader_file import Term, leader_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import has_writer


class AgentStorage(Protocol):
    def leader_of(self, term: Term) -> Mapping[str, Any]:
        """`address`, `port` and `name` of the leader of `term`, or `over` when the job is over;
        empty before a leader has written them. The agent reads it before each connection."""

    def leader_holds_journal(self) -> bool:
        """Whether a process has the journal open for writing. The agent calls it in a worker
        thread, when the leader's port is closed. Raises OSError."""


class AgentFiles:
    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    def leader_of(self, term: Term) -> Mapping[str, Any]:
        return leader_of(self.run_dir, term)

    def leader_holds_journal(self) -> bool:
        return has_writer(self.run_dir.journal)
