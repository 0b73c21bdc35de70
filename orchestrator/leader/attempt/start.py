"""Starts an attempt on its hosts, once all that the orders need is known.

The store of torchrun listens on the first host, so that host's agent chooses a free port. With
copies of checkpoints in memory all agents say what they have. Only then are the hosts ordered.
"""

from collections.abc import Callable, Sequence

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.memory.peers import CopyPlan, SlotsOffered
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.agent_protocol import OfferPort, Port, Start
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.job.state import Run, pace_of, switches_of
from orchestrator.leader.agent_sessions import AgentSessions
from orchestrator.leader.attempt.slot_offers import Layout, SlotOffers, copy_plans
from orchestrator.plan.placement.partners import partners_of
from orchestrator.seams import Clock


class AttemptStart:
    """At most one attempt waits for its start."""

    def __init__(
        self,
        job: JobSubmitted,
        run: Callable[[], Run],
        sessions: AgentSessions,
        run_dir: RunDir,
        clock: Clock,
    ) -> None:
        self.job, self.run, self.sessions, self.run_dir = job, run, sessions, run_dir
        self.pending: StartAttempt | None = None
        self.port = 0
        """What the first host has offered for `pending`; 0: nothing yet."""
        self.slot_offers = SlotOffers(sessions, clock) if job.copies else None

    def begin(self, action: StartAttempt) -> None:
        """Ask the hosts for what their orders need."""
        self.pending, self.port = action, 0
        if self.slot_offers is not None:
            self.slot_offers.ask(action.attempt)
        self.sessions.order(action.hosts[0], OfferPort(attempt=action.attempt))

    def drop(self) -> None:
        """The attempt is stopped. A late answer must not start its ranks."""
        self.pending = None

    def hear_port(self, offer: Port) -> None:
        # A reconnected agent repeats its offer, and the attempt may be over.
        if self.pending is not None and self.pending.attempt == offer.attempt:
            self.port = offer.port
            self.order_if_ready()

    def hear_slots(self, offered: SlotsOffered) -> None:
        if self.slot_offers is not None:
            self.slot_offers.hear(offered)
        self.order_if_ready()

    def order_if_ready(self) -> None:
        """Order all hosts to start if everything is known. Called after each answer, and now and
        then, because an agent may not say in time what it has in memory."""
        action = self.pending
        if action is None or not self.port or (self.slot_offers and not self.slot_offers.are_here):
            return
        self.pending = None
        copies = self._copy_plans(action)
        for node_rank, host in enumerate(action.hosts):
            self.sessions.order(host, self._order(action, node_rank, copies[node_rank]))

    def _order(self, action: StartAttempt, node_rank: int, copies: CopyPlan | None) -> Start:
        run, job = self.run(), self.job
        return Start(
            attempt=action.attempt,
            node_rank=node_rank,
            nodes=len(action.hosts),
            ranks_per_host=run.current.plan.ranks_per_host,
            master_address=run.hosts.by_name[action.hosts[0]].address,
            master_port=self.port,
            config=str(self.run_dir.trainer_config(run.current.number)),
            drills=action.drills,
            # A checkpoint that a first attempt finds but the journal does not know is from another
            # run, so it is not used.
            resume=action.attempt > 1 or run.progress.saved > 0,
            steps=job.steps,
            skip=action.skip,
            lineage=action.lineage,
            copies=copies,
            pace=pace_of(run),
            classes=job.failure_classes,
            run=job.run,
            keep=job.keep,
            capture=job.launch.captured,
            keep_ranks=job.keep_ranks,
            stop_grace=job.stop_grace,
        )

    def _copy_plans(self, action: StartAttempt) -> Sequence[CopyPlan | None]:
        """What each host does with checkpoints in memory; None if there are none."""
        if self.slot_offers is None:
            alone = CopyPlan(resumed=action.resumed) if self.job.in_memory else None
            return [alone] * len(action.hosts)
        run = self.run()
        plan, offers, known = run.current.plan, self.slot_offers.by_host, run.hosts.by_name
        partners = partners_of(
            plan.mesh, plan.ranks_per_host, action.hosts, switches_of(run), self.job.copies
        )
        return copy_plans(
            Layout(hosts=action.hosts, ranks_per_host=plan.ranks_per_host, partners=partners),
            {host: offered for host, offered in offers.items() if host in known},
            {host: known[host].address for host in offers if host in known},
            lineage=action.lineage,
            resumed=action.resumed,
            bytes_per_s=self.job.copy_bytes_per_s,
        )
