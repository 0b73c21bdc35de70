"""What must hold at each event, whatever breaks: an independent count of what `step` should count.

Nothing here asks the supervisor what it thinks of itself where the simulated world can tell. What
follows from the policy is in `recovery_laws.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    TrainingResumed,
)
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
from orchestrator.simulation.world.storage import read_whole
from orchestrator.simulation.world.training_faults import BREAKS, Words

if TYPE_CHECKING:
    from orchestrator.simulation.agents import Agent
    from orchestrator.simulation.leaders import Leader
    from orchestrator.simulation.world.hosts import Host
    from orchestrator.simulation.world.ranks import HostRanks
    from orchestrator.simulation.world.storage import Checkpoint
    from orchestrator.simulation.world.world import World


MOST_DOUBLINGS = 6
"""Of the wait for successors, where all hosts were given up before."""


class Witness:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.marks = 0
        """The newest attempt that made a mark."""
        self.starts = 0
        """Attempts since the last sign of progress."""
        self.outages = 0
        """Moments at which agents went while no rank ran …"""
        self.told = 0
        """… and incidents of such."""
        self.outage_at = 0.0
        """When the last of them began."""
        self.attempt = 0
        self.explained = True
        """Why the attempt before the next one ended has been said."""
        self.requeues: set[tuple[int, int, str]] = set()
        """Launch and restart of the runs that were given back by their leader."""
        self.left_out: set[str] = set()
        """Hosts that the scheduler was last asked to do without."""
        self.shut: set[str] = set()
        """Those that the scheduler itself holds back, as its leader was told last."""
        self.taken: set[str] = set()
        """Hosts that the scheduler took in this attempt, as its leader was told."""
        self.given_up = 0
        """How often all hosts were given up, with successors, since the newest attempt began."""
        self.checked = 0
        """Entries that were replayed."""
        self.replayed = Run()
        self.asked = False
        """The scheduler wants the hosts, and why it has not said yet."""
        self.remedies = Remedies(world)
        self.rules = Rules(world)
        self.blame = Blame(world)

    # Two live attempts that can write

    def writers(self) -> None:
        storage = self.world.storage
        fence = storage.fence.attempt if storage.fence else 0
        able = {
            ranks.attempt
            for host in self.world.hosts.values()
            for ranks in host.ranks
            if ranks.attempt >= fence and storage.serves(host.name)
        }
        hold(len(able) <= 1, f"attempts {sorted(able)} live and can write")

    def fence_raised(self, leader: "Leader") -> None:
        fence = self.world.storage.fence
        mine = fence is None or fence.leader == leader.name
        hold(mine, "a leader that was replaced takes the fence back")

    def marked(self, made: "Checkpoint") -> None:
        attempt = made.attempt
        self.remedies.marked(made)
        hold(attempt >= self.marks, f"attempt {attempt} made a mark after attempt {self.marks}")
        self.marks = attempt

    def rank_struck(self, ranks: "HostRanks", rank: int, words: Words) -> None:
        self.blame.struck[ranks.attempt, rank] = Strike(ranks.host, words)

    def rank_stood(self, ranks: "HostRanks", rank: int) -> None:
        self.blame.stood.add((ranks.attempt, ranks.host, rank))

    def ranks_started(self, ranks: "HostRanks") -> None:
        others = [other for other in ranks.agent.host.ranks if other is not ranks]
        hold(not others, f"{ranks.host} runs ranks of two attempts")

    def taken_for_alive(self, host: "Host") -> None:
        """Of a leader, by a host that leaves its job to it: if it is not, nobody is left who could
        have the job queued again. One whose own host was lost is for the scheduler to miss."""
        world = self.world
        lost = world.storage.holder_host in world.unserved_since
        others = [other for other in world.hosts.values() if other is not host and other.agent]
        known = any(leader.alive for leader in world.leaders.values()) or lost or bool(others)
        hold(known, f"{host.name} leaves the job to a leader that is dead")

    def takes_over(self, agent: "Agent", run: Run) -> None:
        """From a leader that is gone, or cut off from storage and scheduler, or that none of its
        agents hears."""
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
        well = former.alive and former.paused_until <= self.world.timeline.now
        hold(not (well and hears), f"{agent.host.name} ends a leader that {hears} still hear")

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
        """Whatever is made of it, if anything."""
        self.blame.heard(event, before)
        if self._fails_as_it_leaves(event, before):
            self.explained = False

    def decided(
        self, leader: "Leader", event: Event, actions: Sequence[Action], before: Run
    ) -> None:
        run = leader.supervisor.run
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
                    hold(not held, f"{host} is kept off for good, and was only drained")
                case EndJob():
                    hold(isinstance(run.stage, Ended), "the end of a job that has not ended")
                    self._succeeds(action, run)
                case _:
                    hold(before.ending is None, f"{type(action).__name__} after the end")
        self.rules.decided(event, before, run)
        self._sound(run)
        self.writers()

    def _succeeds(self, end: EndJob, run: Run) -> None:
        """What the ranks did is asked of them: the supervisor has it from their agents."""
        if end.state == "SUCCEEDED":
            steps, done = self.world.scenario.steps, self.world.trainings[run.attempt.number].step
            hold(done >= steps, f"the job has succeeded, and {done} of {steps} steps are done")

    def _count(self, event: Event, before: Run, run: Run) -> None:
        if (
            run.interruption.leaving
            and not before.interruption.leaving
            and isinstance(before.stage, ATTEMPT)
        ):
            self.starts -= 1  # to leave when a scheduler asks is no failure
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
                    self.left_out -= set(allocation.hosts)  # it has them back
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
        """Whether something truly broke while the job stopped by its own wish, which excuses
        nothing: a scheduler's wish may be why ranks and agents end, a wish to grow is not."""
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
        """Whether an attempt came to nothing because the scheduler took a host: nobody's fault."""
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
        """`taken`: what the scheduler is said to have said."""
        scheduler = self.world.scheduler
        truly = isinstance(scheduler, Operators) and host in scheduler.evicted
        hold(truly or not taken, f"{host} is said to have been taken, and never was")
        return bool(taken)

    def _spends(self, event: Event, before: Run, run: Run) -> None:
        """What a scheduler wants of a job costs it nothing."""
        failed = len(run.history.incidents) > len(before.history.incidents)
        free = failed or run.history.fruitless <= before.history.fruitless
        hold(free, f"{type(event).__name__} spends the budget, and nothing failed")

    def _goes(self, event: AgentLost | AgentRegistered, before: Run) -> None:
        """Whoever goes within the same seconds goes for one reason."""
        known = before.hosts.by_name.get(event.host)
        had = known is not None and (known.alive or known.back)
        if had and abs(event.at - self.outage_at) > AT_ONCE_S:
            self.outages, self.outage_at = self.outages + 1, event.at

    def _tells(self, before: Run, run: Run) -> None:
        """Once of each, whatever number of hosts it took; and by what the budget was spent."""
        new = run.history.incidents[len(before.history.incidents) :]
        if isinstance(before.stage, IDLE):
            self.told += sum(incident.kind != PREFLIGHT for incident in new)
        hold(self.told <= self.outages, f"{self.told} incidents of {self.outages} outages")
        fresh = before.ending is None and run.stage.reason != before.stage.reason
        spent = fresh and run.stage.reason.endswith(f"(rule {BUDGET})")
        named = bool(new) and new[-1].rule == BUDGET
        hold(named or not spent, "the budget is spent, and no incident says by what")

    def _opens(self, event: Event, run: Run) -> None:
        """A host that the scheduler gave back is one like others."""
        if isinstance(event, HostOpened):
            held = event.host in self._merely_shut(run) and event.host in run.hosts.exclude
            hold(not held, f"{event.host} is left out, and the scheduler has opened it")
            self.shut.discard(event.host)

    def _merely_shut(self, run: Run) -> set[str]:
        """Hosts that nothing speaks against but the scheduler."""
        blamed = {incident.culprit.host for incident in run.history.incidents}
        unfit = {host.name for host in run.hosts.by_name.values() if host.unfit}
        return self.shut - blamed - unfit - {*run.hosts.replaced} - self.left_out

    def _start(self, action: StartAttempt, run: Run) -> None:
        hold(self.explained, f"attempt {action.attempt} starts, why its former ended is not said")
        words = f"attempt {action.attempt} starts, and the scheduler asks for the hosts"
        hold(not self.asked, words)
        hold(action.attempt == self.attempt + 1, f"attempt {action.attempt} after {self.attempt}")
        self.attempt, self.explained = action.attempt, False
        self.given_up = 0
        self.starts += 1
        assert run.job is not None
        budget = run.job.max_restarts + 1
        hold(self.starts <= budget, f"{self.starts} attempts without progress, {budget} allowed")
        hold(len(set(action.hosts)) == len(action.hosts), "a host has two node ranks")
        hold(len(action.hosts) == len(run.plan.hosts), "not as many hosts as planned")
        used = set(action.hosts) & (set(run.hosts.exclude) | self.left_out | self.shut)
        hold(not used, f"{sorted(used)} used, which are to be left out")
        for name in action.hosts:
            host = run.hosts.by_name[name]
            hold(host.alive and not host.unfit, f"{name} used, which is not fit")
            left = [ranks.attempt for ranks in self.world.hosts[name].ranks]
            hold(not left, f"attempt {action.attempt} starts on {name}, where {left} still runs")

    def _blames(self, event: Event, before: Run, run: Run) -> None:
        """Nobody for a host that the scheduler took."""
        if isinstance(event, AgentLost | AgentRegistered) and event.taken:
            self.taken.add(event.host)
        taken = self.taken | (
            {before.scheduler.leader} if isinstance(event, LeaderStarted) and event.taken else set()
        )
        for incident in run.history.incidents[len(before.history.incidents) :]:
            lost = incident.kind in ("host-lost", "leader-lost")
            host = incident.culprit.host
            hold(not (lost and host in taken), f"{host} is blamed, and the scheduler took it")
        if run.attempt.number > before.attempt.number:
            self.taken = set()

    def _requeue(self, leader: "Leader", action: Requeue, at: float, before: Run) -> None:
        patience_s = self.world.scenario.successor_s
        if action.whole and patience_s is not None:
            waited_s = at - before.stage.since if isinstance(before.stage, Waiting) else 0.0
            patience_s *= 2 ** min(self.given_up, MOST_DOUBLINGS)
            words = f"all hosts are given up after {waited_s:.0f} s without a successor"
            hold(waited_s >= patience_s, f"{words}, for the time {self.given_up + 1}")
            self.given_up += 1
        if patience_s is not None:
            held = sorted(self._merely_shut(leader.supervisor.run) & {*action.exclude})
            hold(not held, f"{held} are kept off for good, and were only drained")
        run = leader.agent.launch, leader.agent.restarts, ""
        if (
            leader.supervisor.run.scheduler.allocation
            and self.world.scenario.successor_s is not None
        ):
            run = (*run[:2], leader.name)  # each leader may give its hosts back
        hold(run not in self.requeues, f"launch {run[0]}, run {run[1]} is queued again twice")
        self.requeues.add(run)
        self.left_out = (self.left_out - {*action.again}) | {*action.exclude}

    def _sound(self, run: Run) -> None:
        assert run.job is not None
        hold(run.history.fruitless <= run.job.max_restarts, "more restarts than the budget allows")
        hold((run.ending is None) == (not isinstance(run.stage, Ended)), "half an end")
        numbers = [incident.id for incident in run.history.incidents]
        hold(numbers == list(range(1, len(numbers) + 1)), f"incidents are numbered {numbers}")

    # Journal and end

    def leader_gone(self, leader: "Leader") -> None:
        """What the journal says is what its leader thought."""
        storage = self.world.storage
        entries = storage.recall()
        for entry in entries[self.checked :]:
            self.replayed, actions = self.world.decide(self.replayed, entry.event)
            hold(actions == entry.actions, f"line {entry.seq} replayed decides otherwise")
        self.checked = len(entries)
        own = leader.journal.seq == (entries[-1].seq if entries else 0)
        if own:
            hold(self.replayed == leader.supervisor.run, "the journal's fold is not the state")

    def at_the_end(self) -> None:
        world, run = self.world, self.world.run
        entries = read_whole(bytes(world.storage.journal))
        hold(
            [entry.seq for entry in entries] == list(range(1, len(entries) + 1)),
            "the journal's lines are not numbered in a row",
        )
        hold(run.interruption.findings is None, "the job has ended with trouble that nobody judged")
        for incident in run.history.incidents:
            said = bool(incident.kind and incident.cause and incident.action)
            hold(said, f"incident {incident.id} has no outcome")
            hold(incident.detected_after_s >= 0, f"incident {incident.id} was known before it was")
        self.remedies.at_the_end()
        for host in world.hosts.values():
            left = [ranks.attempt for ranks in host.ranks]
            hold(not left, f"{host.name} still runs ranks of {left}: orphans")
            agents = [agent.incarnation for agent in host.agents if agent.alive]
            hold(not agents, f"{host.name} still has agents {agents}: orphans")
        hold(not world.scheduler.stands, "the scheduler still has the job: an orphan")
