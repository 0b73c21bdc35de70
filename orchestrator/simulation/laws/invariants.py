"""Invariants that hold at each event, whatever fails. They count independently of `step`.

Where the simulated world knows a fact, the laws use it and not the supervisor's view. Laws of
recovery are in `recovery_laws.py`, laws of the policy in `policy_laws.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    TrainingResumed,
)
from orchestrator.failover.after_leader import UNLED, over_for
from orchestrator.failover.journal_watch import runs_without_leader
from orchestrator.job.failures.policy import BUDGET
from orchestrator.job.incident import PREFLIGHT
from orchestrator.job.stage import ATTEMPT, IDLE, OUTSIDE, Ended, Queued, Stopping, Waiting
from orchestrator.job.state import Run
from orchestrator.simulation.laws.culprit_laws import Blame, Strike
from orchestrator.simulation.laws.law import hold
from orchestrator.simulation.laws.policy_laws import Rules
from orchestrator.simulation.laws.recovery_laws import AT_ONCE_S, Remedies
from orchestrator.simulation.world.k8s_operator import Operators
from orchestrator.simulation.world.network import SCHEDULER, STORAGE
from orchestrator.simulation.world.scheduler import Scheduler
from orchestrator.simulation.world.storage import read_whole
from orchestrator.simulation.world.training_faults import BREAKS, Words

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess
    from orchestrator.simulation.processes.leader_process import LeaderProcess
    from orchestrator.simulation.world.ranks import HostRanks
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World


MOST_DOUBLINGS = 6
"""Limit on how often the wait for successors doubles after all hosts were given up."""


class Witness:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.marks = 0
        """The newest attempt that saved a checkpoint."""
        self.starts = 0
        """Attempts since the last sign of progress."""
        self.outages = 0
        """Number of times that agents were lost while no rank ran."""
        self.told = 0
        """Number of incidents that report these outages."""
        self.outage_at = 0.0
        """Start of the last outage."""
        self.attempt = 0
        self.explained = True
        """The journal says why the last attempt ended."""
        self.requeues: set[tuple[int, int, str]] = set()
        """Launch, restart and leader of the runs that were requeued."""
        self.left_out: set[str] = set()
        """Hosts that the scheduler was last asked to exclude."""
        self.shut: set[str] = set()
        """Hosts that the scheduler drains, as the leader last heard."""
        self.taken: set[str] = set()
        """Hosts that the scheduler took in this attempt, as the leader heard."""
        self.given_up = 0
        """How often all hosts were given up since the newest attempt began, on a cluster that
        replaces hosts."""
        self.checked = 0
        """Number of entries that were replayed."""
        self.replayed = Run()
        self.asked = False
        """The scheduler asks for the hosts and has not yet given the reason."""
        self.remedies = Remedies(world)
        self.rules = Rules(world)
        self.blame = Blame(world)

    # At most one attempt can write

    def writers(self) -> None:
        storage = self.world.storage
        fence = storage.fence.attempt if storage.fence else 0
        able = {
            ranks.attempt
            for host in self.world.hosts.values()
            for ranks in host.ranks
            if ranks.attempt >= fence and storage.serves(host.name)
        }
        hold(len(able) <= 1, f"attempts {sorted(able)} run and can write")

    def fence_raised(self, name: str) -> None:
        fence = self.world.storage.fence
        mine = fence is None or fence.leader == name
        hold(mine, "a leader that was replaced takes the fence back")

    def marked(self, made: "Checkpoint") -> None:
        attempt = made.attempt
        self.remedies.marked(made)
        hold(
            attempt >= self.marks,
            f"attempt {attempt} saved a checkpoint after attempt {self.marks} did",
        )
        self.marks = attempt

    def rank_struck(self, ranks: "HostRanks", rank: int, words: Words) -> None:
        self.blame.struck[ranks.attempt, rank] = Strike(ranks.host, words)

    def rank_stood(self, ranks: "HostRanks", rank: int) -> None:
        self.blame.stood.add((ranks.attempt, ranks.host, rank))

    def ranks_started(self, ranks: "HostRanks") -> None:
        others = [other for other in ranks.agent.host.ranks if other is not ranks]
        hold(not others, f"{ranks.host} runs ranks of two attempts")
        fence = self.world.storage.fence
        known = fence is not None and fence.attempt >= ranks.attempt
        hold(known, f"ranks of attempt {ranks.attempt} start, but the fence does not name it")

    def leaves_without_leader(self, agent: "AgentProcess") -> None:
        """An agent of a Slurm run exits because it does not hear the leader. If the run still has
        its hosts and the job has not ended, another process must be left that can continue the
        job. If the leader's host was lost, the scheduler notices it."""
        world, run, scheduler = self.world, self.world.storage.fold(), self.world.scheduler
        assert isinstance(scheduler, Scheduler)
        term = Term(agent.launch, agent.restarts)
        if over_for(run, term) or not scheduler.runs(agent) or not agent.is_alone:
            return
        if runs_without_leader(run, term) >= UNLED:
            return
        lost = world.storage.holder_host in world.unserved_since
        others = [
            other for other in world.hosts.values() if other is not agent.host and other.agent
        ]
        known = any(leader.alive for leader in world.leaders.values()) or lost or bool(others)
        hold(known, f"{agent.host.name} exits, and the leader of the job is dead")

    def takes_over(self, agent: "AgentProcess", run: Run) -> None:
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
            and one.talks_to is former
            and not one.is_alone
        ]
        well = former.alive and not former.is_paused
        hold(not (well and hears), f"{agent.host.name} replaces a leader that {hears} still hear")

    # Each decision

    def submitted(self, before: Run, event: JobSubmitted) -> None:
        self.starts, self.explained, self.left_out, self.shut = 0, True, set(), set()
        self.given_up = 0
        self.remedies.submitted()
        self.rules.submitted()
        self.blame.begins()
        stands = len(set(self.world.scheduler.submissions))
        hold(stands == len(self.world.scheduler.submissions), "one launch was submitted twice")

    def heard(self, event: Event, before: Run) -> None:
        """Called for each event before the supervisor decides."""
        self.blame.heard(event, before)
        if self._fails_as_it_leaves(event, before):
            self.explained = False

    def decided(
        self, leader: "LeaderProcess", event: Event, actions: Sequence[Action], before: Run
    ) -> None:
        run = leader.supervisor.run
        fence = self.world.storage.fence
        mine = fence is not None and fence.leader == leader.fence_name
        hold(mine, f"{leader.name} decides, but the fence names another leader")
        if isinstance(event, RequeueRefused) and isinstance(self.world.scheduler, Scheduler):
            taken = self.world.scheduler.has_requeued(leader.process)
            hold(not taken, "a requeue counts as refused, but the scheduler has requeued the job")
        self._count(event, before, run)
        self._blames(event, before, run)
        self._spends(event, before, run)
        self._opens(event, run)
        self.blame.decided(before, run)
        self.remedies.decided(event, actions, before, run)
        self._tells(before, run)
        for action in actions:
            match action:
                case StartAttempt():
                    self._start(action, run)
                case Requeue():
                    self._requeue(leader, action, event.at, before)
                case ReplaceAgent(host=host, elsewhere=True, shut=False):
                    held = host in self._merely_shut(run)
                    hold(not held, f"{host} is excluded permanently, but was only drained")
                case EndJob():
                    hold(isinstance(run.stage, Ended), "the end of a job that has not ended")
                    self._succeeds(action, run)
                case _:
                    hold(before.ending is None, f"{type(action).__name__} after the end")
        self.rules.decided(event, before, run)
        self._sound(run)
        self.writers()

    def _succeeds(self, end: EndJob, run: Run) -> None:
        """Checks the steps in the ranks themselves; the supervisor knows them from the agents."""
        if end.state == "SUCCEEDED":
            steps, done = self.world.scenario.steps, self.world.trainings[run.attempt.number].step
            hold(done >= steps, f"the job has succeeded, but only {done} of {steps} steps are done")

    def _count(self, event: Event, before: Run, run: Run) -> None:
        if (
            run.interruption.leaving
            and not before.interruption.leaving
            and isinstance(before.stage, ATTEMPT)
        ):
            self.starts -= 1  # a stop that was asked for is not a failure
            self.explained = True
        if len(run.history.incidents) > len(before.history.incidents) or run.ending is not None:
            self.explained = True
        elif self._taken(event, before, run):
            self.starts -= 1
            self.explained = True
        self._hears(event, before, run)
        match event:
            case CheckpointSaved() if run.progress.saved > before.progress.saved:
                self.starts = 0
            case TrainingResumed() if run.progress.saved > before.progress.saved:
                self.starts = min(self.starts, 1)
            case HostFlagged(host=flagged) if not isinstance(before.stage, OUTSIDE):
                (self.left_out if flagged in before.hosts.exclude else self.shut).add(flagged)
            case LeaderStarted(allocation=allocation):
                self.left_out = self.left_out if isinstance(before.stage, Queued) else set()
                self.shut = self.shut if isinstance(self.world.scheduler, Operators) else set()
                if allocation is not None and allocation.successor_s is None:
                    self.left_out -= set(allocation.hosts)  # the scheduler granted them again
            case _:
                pass

    def _hears(self, event: Event, before: Run, run: Run) -> None:
        match event:
            case LeaveAsked(cause=cause) if run.interruption.leaving is not None:
                self.asked = cause is None
            case LeaderStarted():
                self.asked = False
            case AgentLost() | AgentRegistered() if isinstance(before.stage, IDLE):
                self._goes(event, before)
            case _:
                pass

    def _fails_as_it_leaves(self, event: Event, before: Run) -> bool:
        """Whether something failed while the job stopped for a reason of its own. The scheduler's
        request may itself end ranks and agents; a stop to scale up or to replace a straggler does
        not, so a failure during such a stop must become an incident."""
        wish = before.interruption.leaving
        own = wish is not None and (wish.cause == "growing" or wish.straggler is not None)
        if not own or not isinstance(before.stage, Stopping):
            return False
        match event:
            case RankExited(attempt=attempt, rank=rank):
                struck = self.blame.struck.get((attempt, rank))
                return (
                    attempt == before.attempt.number
                    and struck is not None
                    and struck.words in BREAKS
                )
            case AgentLost(host=host, taken=""):
                known = before.hosts.by_name.get(host)
                had = known is not None and known.alive and not known.going
                return had and host in before.attempt.placement and host not in before.attempt.done
            case LeaderStarted():
                return not event.taken
            case _:
                return False

    def _taken(self, event: Event, before: Run, run: Run) -> bool:
        """Whether an attempt ended because the scheduler took a host. That is not a failure."""
        over = run.attempt.number > before.attempt.number or not isinstance(run.stage, ATTEMPT)
        if not over or not isinstance(before.stage, ATTEMPT):
            return False
        if isinstance(event, LeaderStarted) and event.taken:
            return self._evicted(event.taken, before.scheduler.leader)
        lost = before.interruption.findings.lost if before.interruption.findings is not None else ()
        if isinstance(event, AgentLost | AgentRegistered) and event.taken:
            return self._evicted(event.taken, event.host)
        return any(self._evicted(one.taken, one.host) for one in lost)

    def _evicted(self, taken: str, host: str) -> bool:
        """`taken`: the scheduler's reason in the event; empty if it took no host."""
        scheduler = self.world.scheduler
        truly = isinstance(scheduler, Operators) and host in scheduler.evicted
        hold(truly or not taken, f"{host} is recorded as taken by the scheduler, and never was")
        return bool(taken)

    def _spends(self, event: Event, before: Run, run: Run) -> None:
        """A request of the scheduler does not count against the budget."""
        failed = len(run.history.incidents) > len(before.history.incidents)
        free = failed or run.history.fruitless <= before.history.fruitless
        hold(free, f"{type(event).__name__} spends the budget, but nothing failed")

    def _goes(self, event: AgentLost | AgentRegistered, before: Run) -> None:
        """Hosts that are lost within the same seconds count as one outage."""
        known = before.hosts.by_name.get(event.host)
        had = known is not None and (known.alive or known.back)
        if had and abs(event.at - self.outage_at) > AT_ONCE_S:
            self.outages, self.outage_at = self.outages + 1, event.at

    def _tells(self, before: Run, run: Run) -> None:
        """Each outage has at most one incident, whatever the number of hosts. An incident names the
        cause when the budget is spent."""
        new = run.history.incidents[len(before.history.incidents) :]
        if isinstance(before.stage, IDLE):
            self.told += sum(incident.kind != PREFLIGHT for incident in new)
        hold(self.told <= self.outages, f"{self.told} incidents of {self.outages} outages")
        fresh = before.ending is None and run.stage.reason != before.stage.reason
        spent = fresh and run.stage.reason.endswith(f"(rule {BUDGET})")
        named = bool(new) and new[-1].rule == BUDGET
        hold(named or not spent, "the budget is spent, but no incident says by what")

    def _opens(self, event: Event, run: Run) -> None:
        """A host that is no longer drained may be used again."""
        if isinstance(event, HostOpened):
            held = event.host in self._merely_shut(run) and event.host in run.hosts.exclude
            hold(not held, f"{event.host} is excluded, but the scheduler no longer drains it")
            self.shut.discard(event.host)

    def _merely_shut(self, run: Run) -> set[str]:
        """Hosts that are excluded only because the scheduler drains them."""
        blamed = {incident.culprit.host for incident in run.history.incidents}
        unfit = {host.name for host in run.hosts.by_name.values() if host.unfit}
        return self.shut - blamed - unfit - {*run.hosts.replaced} - self.left_out

    def _start(self, action: StartAttempt, run: Run) -> None:
        hold(
            self.explained,
            f"attempt {action.attempt} starts, but nothing says why the last attempt ended",
        )
        words = f"attempt {action.attempt} starts while the scheduler asks for the hosts"
        hold(not self.asked, words)
        hold(action.attempt == self.attempt + 1, f"attempt {action.attempt} after {self.attempt}")
        self.attempt, self.explained = action.attempt, False
        self.given_up = 0
        self.starts += 1
        assert run.job is not None
        budget = run.job.max_restarts + 1
        hold(self.starts <= budget, f"{self.starts} attempts without progress, {budget} allowed")
        hold(len(set(action.hosts)) == len(action.hosts), "a host has two node ranks")
        hold(
            len(action.hosts) == len(run.plan.hosts),
            "attempt and plan differ in hosts",
        )
        used = set(action.hosts) & (set(run.hosts.exclude) | self.left_out | self.shut)
        hold(not used, f"{sorted(used)} used, but they are excluded")
        for name in action.hosts:
            host = run.hosts.by_name[name]
            hold(host.alive and not host.unfit, f"{name} used, but it is lost or unfit")
            left = [ranks.attempt for ranks in self.world.hosts[name].ranks]
            hold(not left, f"attempt {action.attempt} starts on {name}, where {left} still runs")

    def _blames(self, event: Event, before: Run, run: Run) -> None:
        """A host that the scheduler took is never a culprit."""
        if isinstance(event, AgentLost | AgentRegistered) and event.taken:
            self.taken.add(event.host)
        elif isinstance(event, AgentLost):
            self.taken.discard(event.host)  # it came back, and this loss has another cause
        taken = self.taken | (
            {before.scheduler.leader} if isinstance(event, LeaderStarted) and event.taken else set()
        )
        for incident in run.history.incidents[len(before.history.incidents) :]:
            lost = incident.kind in ("host-lost", "leader-lost")
            host = incident.culprit.host
            hold(not (lost and host in taken), f"{host} is blamed, but the scheduler took it")
        if run.attempt.number > before.attempt.number:
            self.taken = set()

    def _requeue(self, leader: "LeaderProcess", action: Requeue, at: float, before: Run) -> None:
        patience_s = self.world.scenario.successor_s
        if action.whole and patience_s is not None:
            waited_s = at - before.stage.since if isinstance(before.stage, Waiting) else 0.0
            patience_s *= 2 ** min(self.given_up, MOST_DOUBLINGS)
            words = f"all hosts are given up after {waited_s:.0f} s without a successor"
            hold(waited_s >= patience_s, f"{words}, for the time {self.given_up + 1}")
            self.given_up += 1
        if patience_s is not None:
            held = sorted(self._merely_shut(leader.supervisor.run) & {*action.exclude})
            hold(not held, f"{held} are excluded permanently, but were only drained")
        run = leader.agent.launch, leader.agent.restarts, ""
        if (
            leader.supervisor.run.scheduler.allocation
            and self.world.scenario.successor_s is not None
        ):
            run = (*run[:2], leader.name)  # each leader may requeue once
        hold(run not in self.requeues, f"launch {run[0]}, run {run[1]} is requeued twice")
        self.requeues.add(run)
        self.left_out = (self.left_out - {*action.again}) | {*action.exclude}

    def _sound(self, run: Run) -> None:
        assert run.job is not None
        hold(run.history.fruitless <= run.job.max_restarts, "more restarts than the budget allows")
        hold(
            (run.ending is None) == (not isinstance(run.stage, Ended)),
            "the stage contradicts the ending",
        )
        numbers = [incident.id for incident in run.history.incidents]
        hold(numbers == list(range(1, len(numbers) + 1)), f"incidents are numbered {numbers}")

    # Journal and end

    def leader_gone(self, leader: "LeaderProcess") -> None:
        """Replaying the journal gives the state and the actions of its leader."""
        storage = self.world.storage
        entries = storage.recall()
        for entry in entries[self.checked :]:
            self.replayed, actions = self.world.decide(self.replayed, entry.event)
            hold(actions == entry.actions, f"replaying line {entry.seq} gives other actions")
        self.checked = len(entries)
        own = leader.journal.seq == (entries[-1].seq if entries else 0)
        if own:
            hold(
                self.replayed == leader.supervisor.run,
                "replaying gives another state",
            )

    def at_the_end(self) -> None:
        world, run = self.world, self.world.run
        entries = read_whole(bytes(world.storage.journal))
        hold(
            [entry.seq for entry in entries] == list(range(1, len(entries) + 1)),
            "the sequence numbers of the journal have gaps",
        )
        hold(
            run.interruption.findings is None,
            "the job ended with a failure without incident",
        )
        for incident in run.history.incidents:
            said = bool(incident.kind and incident.cause and incident.action)
            hold(said, f"incident {incident.id} has no outcome")
            hold(
                incident.detected_after_s >= 0,
                f"incident {incident.id} is detected too early",
            )
        self.remedies.at_the_end()
        for host in world.hosts.values():
            left = [ranks.attempt for ranks in host.ranks]
            hold(not left, f"{host.name} still runs ranks of attempts {left}")
            agents = [agent.incarnation for agent in host.agents if agent.alive]
            hold(not agents, f"{host.name} still has agents {agents}")
        hold(not world.scheduler.stands, "the scheduler still has the job")
