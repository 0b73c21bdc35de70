"""Has hosts without ranks start some that wait, so that these can replace a lost host's at once."""

from msgspec import Struct, field

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Prepare
from orchestrator.job.stage import Running, Starting
from orchestrator.job.state import Run, usable
from orchestrator.leader.agent_sessions import AgentSessions


class Spares(Struct, kw_only=True):
    sessions: AgentSessions
    run_dir: RunDir
    ordered: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Host -> the attempt in which its agent was last ordered to prepare, and that agent."""

    def prepare(self, run: Run) -> None:
        """Order all spares that were not ordered yet. Called often."""
        if (
            run.job is None
            or not run.job.keep_ranks
            or not isinstance(run.stage, Starting | Running)
        ):
            return
        for host in set(usable(run)) - set(run.attempt.placement):
            agent = (run.attempt.number, run.hosts.by_name[host].incarnation)
            if self.ordered.get(host) == agent:
                continue
            self.ordered[host] = agent
            order = Prepare(
                attempt=run.attempt.number,
                ranks_per_host=run.current.plan.ranks_per_host,
                config=str(self.run_dir.trainer_config(run.current.number)),
            )
            self.sessions.order(host, order)
