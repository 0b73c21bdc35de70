"""Invariants that hold at each event, whatever fails. They count independently of `step`.

Where the simulated world knows a fact, the laws use it and not the supervisor's view. Laws of
recovery are in `recovery_laws.py`, laws of the policy in `policy_laws.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.messages.actions import (
    Action,
    EndJob,
    ReplaceAgent,
    Requeue,
    StartAttempt,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CheckpointSaved,
    Event,
    HostFlagged,
    HostOpened,
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
    RankExited,
    RequeueRefused,
    Tick,
    TrainingResumed,
)
from orchestrator.failover.after_leader import UNLED, over_for
from orchestrator.failover.journal_watch import runs_without_leader
from orchestrator.job.failures.policy import BUDGET
from orchestrator.job.incident import PREFLIGHT
from orchestrator.job.stage import ATTEMPT, IDLE, OUTSIDE, Ended, Queued, Stopping, Waiting
from orchestrator.job.state import Run
from orchestrator.simulation.laws.culprit_laws import CulpritLaws, FailedRank
from orchestrator.simulation.laws.law import reached, require
from orchestrator.simulation.laws.memory_laws import MemoryLaws
from orchestrator.simulation.laws.policy_laws import PolicyLaws
from orchestrator.simulation.laws.recovery_laws import SAME_MOMENT_S, RecoveryLaws
from orchestrator.simulation.world.k8s_operator import KubernetesOperator
from orchestrator.simulation.world.network import SCHEDULER, STORAGE
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import decode_all
from orchestrator.simulation.world.training_faults import HARDWARE_FAILURES, RankFailure

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.processes.leader_process import LeaderProcess
    from orchestrator.simulation.world.ranks import HostRanks
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World


MOST_DOUBLINGS = 6
"""Limit on how often the wait for successors doubles after all hosts were given up."""


class Laws:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.saving_attempt = 0
        """The newest attempt that saved a checkpoint."""
        self.attempts_without_progress = 0
        """Attempts since the last sign of progress."""
        self.outages = 0
        """Number of times that agents were lost while no rank ran."""
        self.outage_incidents = 0
        """Number of incidents that report these outages."""
        self.outage_at = 0.0
        """Start of the last outage."""
        self.attempt = 0
        self.end_explained = True
        """The journal says why the last attempt ended."""
        self.requeues: set[tuple[int, int, str]] = set()
        """Launch, restart and leader of the runs that were requeued."""
        self.excluded: set[str] = set()
        """Hosts that the scheduler was last asked to exclude."""
        self.drained: set[str] = set()
        """Hosts that the scheduler drains, as the leader last heard."""
        self.evicted: set[str] = set()
        """Hosts that the scheduler took in this attempt, as the leader heard."""
        self.lost_before: set[str] = set()
        """Hosts that were lost in this attempt and that the scheduler had not taken."""
        self.full_requeues = 0
        """How often all hosts were given up since the newest attempt began, on a cluster that
        replaces hosts."""
        self.num_replayed = 0
        """Number of entries that were replayed."""
        self.replayed = Run()
        self.hosts_requested = False
        """The scheduler asks for the hosts and has not yet given the reason."""
        self.recovery = RecoveryLaws(world)
        self.memory = MemoryLaws(world)
        self.policy = PolicyLaws(world)
        self.culprits = CulpritLaws(world)

    # At most one attempt can write

    def check_writers(self) -> None:
        storage = self.world.storage
        fence = storage.fence.attempt if storage.fence else 0
        able = {
            ranks.attempt
            for host in self.world.hosts.values()
            for ranks in host.ranks
            if ranks.attempt >= fence and storage.reachable_from(host.name)
        }
        require(len(able) <= 1, f"attempts {sorted(able)} run and can write")

    def check_fence_write(self, name: str) -> None:
        fence = self.world.storage.fence
        mine = fence is None or fence.leader == name
        require(mine, "a leader that was replaced takes the fence back")

    def checkpoint_saved(self, saved: "Checkpoint") -> None:
        attempt = saved.attempt
        self.recovery.checkpoint_saved(saved)
        require(
            attempt >= self.saving_attempt,
            f"attempt {attempt} saved a checkpoint after attempt {self.saving_attempt} did",
        )
        self.saving_attempt = attempt

    def rank_exited(self, ranks: "HostRanks", rank: int, failure: RankFailure) -> None:
        self.culprits.failed_ranks[ranks.attempt, rank] = FailedRank(ranks.host, failure)

    def rank_hung(self, ranks: "HostRanks", rank: int) -> None:
        self.culprits.hung_ranks.add((ranks.attempt, ranks.host, rank))

    def ranks_started(self, ranks: "HostRanks") -> None:
        others = [other for other in ranks.agent.host.ranks if other is not ranks]
        require(not others, f"{ranks.host} runs ranks of two attempts")
        fence = self.world.storage.fence
        known = fence is not None and fence.attempt >= ranks.attempt
        require(known, f"ranks of attempt {ranks.attempt} start, but the fence does not name it")

    def check_exit_without_leader(self, agent: "AgentProcess") -> None:
        """An agent whose job keeps its hosts exits because it does not hear the leader. If the run
        still has its hosts and the job has not ended, another process must be left that can
        continue the job. If the leader's host was lost, a scheduler notices it."""
        world, run, scheduler = self.world, self.world.storage.fold(), self.world.scheduler
        term = Term(agent.launch, agent.restarts)
        if over_for(run, term) or not agent.is_alone:
            return
        if world.scenario.scheduled:
            assert isinstance(scheduler, Scheduler)
            if not scheduler.still_has_hosts(agent):
                return
        elif runs_without_leader(run, term):
            return  # no leader ever started, and no scheduler can start the job again
        if runs_without_leader(run, term) >= UNLED:
            return
        lost = world.storage.holder_host in world.storage_lost_since
        others = [
            other for other in world.hosts.values() if other is not agent.host and other.agent
        ]
        known = any(leader.alive for leader in world.leaders.values()) or lost or bool(others)
        require(known, f"{agent.host.name} exits, and the leader of the job is dead")

    def check_takeover(self, agent: "AgentProcess", run: Run) -> None:
        """An agent may take over only if the leader is dead, is cut off from storage or scheduler,
        or is not heard by any of its agents."""
        former, network = self.world.leader, self.world.network
        if former is None or former.host.name != run.scheduler.leader:
            return
        if not all(network.reaches(run.scheduler.leader, there) for there in (SCHEDULER, STORAGE)):
            return
        hears = [
            name
            for name in run.attempt.placement
            if name not in (former.host.name, agent.host.name)
            and (one := self.world.hosts[name].agent) is not None
            and one.heard_leader is former
            and not one.is_alone
        ]
        well = former.alive and not former.is_paused
        require(
            not (well and hears), f"{agent.host.name} replaces a leader that {hears} still hear"
        )

    # Each decision

    def job_submitted(self, before: Run, event: JobSubmitted) -> None:
        self.attempts_without_progress, self.end_explained, self.excluded, self.drained = (
            0,
            True,
            set(),
            set(),
        )
        self.full_requeues = 0
        self.recovery.job_submitted()
        self.policy.job_submitted()
        self.culprits.reset()
        distinct = len(set(self.world.scheduler.submissions))
        require(distinct == len(self.world.scheduler.submissions), "one launch was submitted twice")

    def before_decision(self, event: Event, before: Run) -> None:
        """Called for each event before the supervisor decides."""
        self.culprits.before_decision(event, before)
        if self._fails_during_stop(event, before):
            self.end_explained = False

    def check_decision(
        self, leader: "LeaderProcess", event: Event, actions: Sequence[Action], before: Run
    ) -> None:
        run = leader.supervisor.run
        fence = self.world.storage.fence
        mine = fence is not None and fence.leader == leader.fence_name
        require(mine, f"{leader.name} decides, but the fence names another leader")
        if isinstance(event, Tick) and run is not before:
            require(run != before, "a tick that changes nothing gets a line in the journal")
        if isinstance(event, RequeueRefused) and isinstance(self.world.scheduler, Scheduler):
            taken = self.world.scheduler.has_requeued(leader.process)
            require(
                not taken, "a requeue counts as refused, but the scheduler has requeued the job"
            )
        self._count_attempts(event, before, run)
        self._check_no_evicted_culprit(event, before, run)
        self._check_budget(event, before, run)
        self._check_reopened(event, run)
        self.culprits.check_decision(event, before, run)
        self.recovery.check_decision(event, actions, before, run)
        self._check_outage_incidents(before, run)
        for action in actions:
            match action:
                case StartAttempt():
                    self._check_start(action, run)
                case Requeue():
                    self._check_requeue(leader, action, event.at, before)
                case ReplaceAgent(host=host, elsewhere=True, shut=False):
                    held = host in self._only_drained(run)
                    require(not held, f"{host} is excluded permanently, but was only drained")
                case EndJob():
                    require(isinstance(run.stage, Ended), "the end of a job that has not ended")
                    self._check_success(action, run)
                case _:
                    require(before.ending is None, f"{type(action).__name__} after the end")
        self.policy.check_decision(event, before, run)
        self._check_state(run)
        self.check_writers()

    def _check_success(self, end: EndJob, run: Run) -> None:
        """Checks the steps in the ranks themselves; the supervisor knows them from the agents."""
        if end.state == "SUCCEEDED":
            steps, done = self.world.scenario.steps, self.world.trainings[run.attempt.number].step
            require(
                done >= steps, f"the job has succeeded, but only {done} of {steps} steps are done"
            )

    def _count_attempts(self, event: Event, before: Run, run: Run) -> None:
        if (
            run.interruption.leaving
            and not before.interruption.leaving
            and isinstance(before.stage, ATTEMPT)
        ):
            self.attempts_without_progress -= 1  # a stop that was asked for is not a failure
            self.end_explained = True
        if len(run.history.incidents) > len(before.history.incidents) or run.ending is not None:
            self.end_explained = True
        elif self._ended_by_eviction(event, before, run):
            self.attempts_without_progress -= 1
            self.end_explained = True
        self._note_event(event, before, run)
        match event:
            case CheckpointSaved() if run.progress.saved > before.progress.saved:
                self.attempts_without_progress = 0
            case TrainingResumed() if reached(run) > reached(before):
                self.attempts_without_progress = min(self.attempts_without_progress, 1)
            case HostFlagged(host=flagged) if not isinstance(before.stage, OUTSIDE):
                (self.excluded if flagged in before.hosts.exclude else self.drained).add(flagged)
            case LeaderStarted(allocation=allocation):
                self.excluded = self.excluded if isinstance(before.stage, Queued) else set()
                self.drained = (
                    self.drained if isinstance(self.world.scheduler, KubernetesOperator) else set()
                )
                if allocation is not None and allocation.successor_s is None:
                    self.excluded -= set(allocation.hosts)  # the scheduler granted them again
            case _:
                pass

    def _note_event(self, event: Event, before: Run, run: Run) -> None:
        match event:
            case LeaveAsked(cause=cause) if run.interruption.leaving is not None:
                self.hosts_requested = cause is None
            case LeaderStarted():
                self.hosts_requested = False
            case AgentLost() | AgentRegistered() if isinstance(before.stage, IDLE):
                self._note_outage(event, before)
            case _:
                pass

    def _fails_during_stop(self, event: Event, before: Run) -> bool:
        """Whether something failed while the job stopped for a reason of its own. The scheduler's
        request may itself end ranks and agents; a stop to scale up or to replace a host does not,
        so a failure during such a stop must become an incident."""
        wish = before.interruption.leaving
        own = wish is not None and (
            wish.cause == "growing" or wish.straggler is not None or wish.warned
        )
        if not own or not isinstance(before.stage, Stopping):
            return False
        match event:
            case RankExited(attempt=attempt, rank=rank):
                failed = self.culprits.failed_ranks.get((attempt, rank))
                return (
                    attempt == before.attempt.number
                    and failed is not None
                    and failed.failure in HARDWARE_FAILURES
                )
            case AgentLost(host=host, taken=""):
                known = before.hosts.by_name.get(host)
                had = known is not None and known.alive and not known.going
                return had and host in before.attempt.placement and host not in before.attempt.done
            case LeaderStarted():
                return not event.taken
            case _:
                return False

    def _ended_by_eviction(self, event: Event, before: Run, run: Run) -> bool:
        """Whether an attempt ended because the scheduler took a host. That is not a failure."""
        over = run.attempt.number > before.attempt.number or not isinstance(run.stage, ATTEMPT)
        if not over or not isinstance(before.stage, ATTEMPT):
            return False
        if isinstance(event, LeaderStarted) and event.taken:
            return self._check_evicted(event.taken, before.scheduler.leader)
        lost = before.interruption.findings.lost if before.interruption.findings is not None else ()
        if isinstance(event, AgentLost | AgentRegistered) and event.taken:
            return self._check_evicted(event.taken, event.host)
        return any(self._check_evicted(one.taken, one.host) for one in lost)

    def _check_evicted(self, taken: str, host: str) -> bool:
        """`taken`: the scheduler's reason in the event; empty if it took no host."""
        scheduler = self.world.scheduler
        truly = isinstance(scheduler, KubernetesOperator) and host in scheduler.evicted
        require(truly or not taken, f"{host} is recorded as taken by the scheduler, and never was")
        return bool(taken)

    def _check_budget(self, event: Event, before: Run, run: Run) -> None:
        """A request of the scheduler does not count against the budget."""
        failed = len(run.history.incidents) > len(before.history.incidents)
        free = failed or run.history.fruitless <= before.history.fruitless
        require(free, f"{type(event).__name__} spends the budget, but nothing failed")

    def _note_outage(self, event: AgentLost | AgentRegistered, before: Run) -> None:
        """Hosts that are lost within the same seconds count as one outage."""
        known = before.hosts.by_name.get(event.host)
        had = known is not None and (known.alive or known.back)
        if had and abs(event.at - self.outage_at) > SAME_MOMENT_S:
            self.outages, self.outage_at = self.outages + 1, event.at

    def _check_outage_incidents(self, before: Run, run: Run) -> None:
        """Each outage has at most one incident, whatever the number of hosts. An incident names the
        cause when the budget is spent."""
        new = run.history.incidents[len(before.history.incidents) :]
        if isinstance(before.stage, IDLE):
            self.outage_incidents += sum(incident.kind != PREFLIGHT for incident in new)
        require(
            self.outage_incidents <= self.outages,
            f"{self.outage_incidents} incidents of {self.outages} outages",
        )
        fresh = before.ending is None and run.stage.reason != before.stage.reason
        spent = fresh and run.stage.reason.endswith(f"(rule {BUDGET})")
        named = bool(new) and new[-1].rule == BUDGET
        require(named or not spent, "the budget is spent, but no incident says by what")

    def _check_reopened(self, event: Event, run: Run) -> None:
        """A host that is no longer drained may be used again. A leader that has given its hosts
        back decides nothing more: the next one asks again."""
        if isinstance(event, HostOpened) and not isinstance(run.stage, Queued):
            held = event.host in self._only_drained(run) and event.host in run.hosts.exclude
            require(not held, f"{event.host} is excluded, but the scheduler no longer drains it")
            self.drained.discard(event.host)

    def _only_drained(self, run: Run) -> set[str]:
        """Hosts that are excluded only because the scheduler drains them."""
        blamed = {incident.culprit.host for incident in run.history.incidents}
        unfit = {host.name for host in run.hosts.by_name.values() if host.unfit}
        return self.drained - blamed - unfit - {*run.hosts.replaced} - self.excluded

    def _check_start(self, action: StartAttempt, run: Run) -> None:
        require(
            self.end_explained,
            f"attempt {action.attempt} starts, but nothing says why the last attempt ended",
        )
        message = f"attempt {action.attempt} starts while the scheduler asks for the hosts"
        require(not self.hosts_requested, message)
        require(
            action.attempt == self.attempt + 1, f"attempt {action.attempt} after {self.attempt}"
        )
        self.attempt, self.end_explained = action.attempt, False
        self.full_requeues = 0
        self.attempts_without_progress += 1
        assert run.job is not None
        budget = run.job.max_restarts + 1
        require(
            self.attempts_without_progress <= budget,
            f"{self.attempts_without_progress} attempts without progress, {budget} allowed",
        )
        require(len(set(action.hosts)) == len(action.hosts), "a host has two node ranks")
        require(
            len(action.hosts) == len(run.plan.hosts),
            "attempt and plan differ in hosts",
        )
        used = set(action.hosts) & (set(run.hosts.exclude) | self.excluded | self.drained)
        require(not used, f"{sorted(used)} used, but they are excluded")
        for name in action.hosts:
            host = run.hosts.by_name[name]
            require(host.alive and not host.unfit, f"{name} used, but it is lost or unfit")
            left = [ranks.attempt for ranks in self.world.hosts[name].ranks]
            require(not left, f"attempt {action.attempt} starts on {name}, where {left} still runs")

    def _check_no_evicted_culprit(self, event: Event, before: Run, run: Run) -> None:
        """A host that the scheduler took is never a culprit."""
        if isinstance(event, AgentLost | AgentRegistered) and event.taken:
            self.evicted.add(event.host)
        elif isinstance(event, AgentLost) or _replaces(event, before):
            self.evicted.discard(event.host)  # it came back, and this loss has another cause
            self.lost_before.add(event.host)
        taken = self.evicted | (
            {before.scheduler.leader} if isinstance(event, LeaderStarted) and event.taken else set()
        )
        # A host that was lost for another reason first may be blamed for that.
        taken -= self.lost_before
        for incident in run.history.incidents[len(before.history.incidents) :]:
            lost = incident.kind in ("host-lost", "leader-lost")
            host = incident.culprit.host
            require(not (lost and host in taken), f"{host} is blamed, but the scheduler took it")
        if run.attempt.number > before.attempt.number:
            self.evicted = set()
            self.lost_before = set()

    def _check_requeue(
        self, leader: "LeaderProcess", action: Requeue, at: float, before: Run
    ) -> None:
        patience_s = self.world.scenario.successor_s
        if action.whole and patience_s is not None:
            waited_s = at - before.stage.since if isinstance(before.stage, Waiting) else 0.0
            patience_s *= 2 ** min(self.full_requeues, MOST_DOUBLINGS)
            message = f"all hosts are given up after {waited_s:.0f} s without a successor"
            require(waited_s >= patience_s, f"{message}, for the time {self.full_requeues + 1}")
            self.full_requeues += 1
        if patience_s is not None:
            held = sorted(self._only_drained(leader.supervisor.run) & {*action.exclude})
            require(not held, f"{held} are excluded permanently, but were only drained")
        run = leader.agent.launch, leader.agent.restarts, ""
        if (
            leader.supervisor.run.scheduler.allocation
            and self.world.scenario.successor_s is not None
        ):
            run = (*run[:2], leader.name)  # each leader may requeue once
        require(run not in self.requeues, f"launch {run[0]}, run {run[1]} is requeued twice")
        self.requeues.add(run)
        self.excluded = (self.excluded - {*action.again}) | {*action.exclude}

    def _check_state(self, run: Run) -> None:
        assert run.job is not None
        require(
            run.history.fruitless <= run.job.max_restarts, "more restarts than the budget allows"
        )
        require(
            (run.ending is None) == (not isinstance(run.stage, Ended)),
            "the stage contradicts the ending",
        )
        numbers = [incident.id for incident in run.history.incidents]
        require(numbers == list(range(1, len(numbers) + 1)), f"incidents are numbered {numbers}")

    # Journal and end

    def leader_ended(self, leader: "LeaderProcess") -> None:
        """Replaying the journal gives the state and the actions of its leader."""
        storage = self.world.storage
        entries = storage.read_entries()
        for entry in entries[self.num_replayed :]:
            self.replayed, actions = self.world.decide(self.replayed, entry.event)
            require(actions == entry.actions, f"replaying line {entry.seq} gives other actions")
        self.num_replayed = len(entries)
        own = leader.journal.seq == (entries[-1].seq if entries else 0)
        if own:
            require(
                self.replayed == leader.supervisor.run,
                "replaying gives another state",
            )

    def at_end(self) -> None:
        world, run = self.world, self.world.run
        entries = decode_all(bytes(world.storage.journal))
        require(
            [entry.seq for entry in entries] == list(range(1, len(entries) + 1)),
            "the sequence numbers of the journal have gaps",
        )
        require(
            run.interruption.findings is None,
            "the job ended with a failure without incident",
        )
        for incident in run.history.incidents:
            said = bool(incident.kind and incident.cause and incident.action)
            require(said, f"incident {incident.id} has no outcome")
            require(
                incident.detected_after_s >= 0,
                f"incident {incident.id} is detected too early",
            )
        self.recovery.at_end()
        for host in world.hosts.values():
            left = [ranks.attempt for ranks in host.ranks]
            require(not left, f"{host.name} still runs ranks of attempts {left}")
            agents = [agent.incarnation for agent in host.agents if agent.alive]
            require(not agents, f"{host.name} still has agents {agents}")
        require(not world.scheduler.has_job, "the scheduler still has the job")


def _replaces(event: Event, before: Run) -> TypeGuard[AgentRegistered]:
    """Another agent took the place of a live one: the loss of that one gets no event of its own."""
    if not isinstance(event, AgentRegistered):
        return False
    known = before.hosts.by_name.get(event.host)
    return known is not None and known.alive and known.incarnation != event.incarnation
