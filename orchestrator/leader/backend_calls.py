"""What a leader has done beside its decisions, for each may take long: it asks a scheduler, has the
hosts try each other, or looks for a smaller plan. What comes of an errand is an event like others.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.check_results import Finding
from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.actions import CheckHosts, ReplaceAgent, Replan, Requeue
from orchestrator.contract.messages.agent_protocol import Checked, CheckFabric, Leave, Register
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    Event,
    HostsChecked,
    HostUnavailable,
    JobSubmitted,
    LeaveAsked,
    Replanned,
    ReplanRefused,
    RequeueRefused,
)
from orchestrator.contract.plan import Plan
from orchestrator.detect.fabric import judge
from orchestrator.errors import BackendError, Ended, MustLeave, NdctlError, Unanswered
from orchestrator.failover.after_leader import no_more_of_it
from orchestrator.failover.ask_scheduler import REFUSED_S
from orchestrator.health.clocks_and_names import NAME_S, clock_skew, looked_up
from orchestrator.job.hosts.scheduler_notices import (
    HURRY_S,
    asked_about,
    heard,
    news,
    next_question_s,
    unheard,
)
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.job.state import Run, has_successors, switches_of, usable
from orchestrator.leader.agent_sessions import AgentSessions
from orchestrator.posix.fd_limit import files_needed, judge_files
from orchestrator.seams import AllocationBackend, Clock, GrantingScheduler, Worker

log = logging.getLogger(__name__)

CHECK_POLL_S = 0.1
CHECK_SLACK_S = 5.0
"""For reports of a check to come in after its time is over."""
REQUEUE_RETRY_S = 5.0
TAKEN_S = 5.0
"""For the scheduler to say whether it took a host: its loss waits for that."""
CUT_OFF_S = 300.0
"""For a leader in another place to take over from one that hears nobody: Slurm's own default of
SlurmdTimeout, after which it gives up a node."""
CUT_OFF_POLL_S = 2.0
LISTEN_S = 3.0
"""Beside the time that an agent may be silent, once the scheduler is heard again: for agents that
live to come back."""

Refitter = Callable[[Plan, Sequence[str], Mapping[str, tuple[str, ...]], Shortage], Refit]
"""Of a plan that did not fit, the hosts there are, the switches above them, and what is believed of
a device: what helps. Raises PlanError."""
Replanner = Callable[[Plan, Sequence[str], Mapping[str, tuple[str, ...]]], JobPlan]
"""Of a plan, the hosts that are left and the switches above them: a plan for no more than those.
Raises PlanError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planners:
    fewer: Replanner
    less: Refitter


class BackendCalls:
    def __init__(  # noqa: PLR0913 - the world outside, piece by piece
        self,
        *,
        job: JobSubmitted,
        run: Callable[[], Run],
        sessions: AgentSessions,
        backend: AllocationBackend,
        planners: Planners,
        clock: Clock,
        happened: Callable[[Event], None],
        gives_up: Callable[[str], None],
        in_touch: asyncio.Event,
        now: Callable[[], float],
        names_resolve: bool = True,
        worker: Worker = asyncio.to_thread,
    ) -> None:
        self.worker = worker
        self.job = job
        self.run = run
        self.sessions = sessions
        self.backend = backend
        self.replanner, self.refitter = planners.fewer, planners.less
        self.clock = clock
        self.happened = happened
        self.gives_up = gives_up
        """Have the leader leave without a word: the job is another's to lead."""
        self.in_touch = in_touch
        """Cleared while neither agents nor scheduler are heard."""
        self.now = now
        self.host = self.address = ""
        """The leader's own, once it serves."""
        self.names_resolve = names_resolve
        self.checked: dict[str, Checked] = {}
        """What hosts have said of the check that is going on."""

    @property
    def granted(self) -> GrantingScheduler:
        """Only for jobs with an allocation."""
        assert self.backend.granted is not None
        return self.backend.granted

    async def lose(self, lost: Sequence[AgentLost], hosts: Sequence[str]) -> None:
        """Agents fell silent; with `hosts`, which are all that the job has, all others did at once.
        Those that are heard again meanwhile were not lost."""
        try:
            names = [event.host for event in lost]
            cut_off_s = await self._alone(hosts, names) if hosts else 0.0
            if cut_off_s is not None:
                await self._tell_lost(lost, cut_off_s)
        finally:
            self.in_touch.set()

    async def _tell_lost(self, lost: Sequence[AgentLost], cut_off_s: float) -> None:
        silent_s = {event.host: event.silent_s for event in lost}
        taken = await self._taken(silent_s) if has_successors(self.run()) else {}
        for event in lost:
            if event.host not in self.sessions.by_host:
                known = taken.get(event.host, "")
                self.happened(replace(event, taken=known, cut_off_s=cut_off_s))

    async def taken_before(self, host: str, silent_s: float) -> str:
        """Why the scheduler took the agent in whose place there is another already, before its
        silence was noticed."""
        known = self.run().hosts.by_name.get(host)
        if known is None or not known.alive or not has_successors(self.run()):
            return ""
        return (await self._taken({host: silent_s})).get(host, "")

    async def _taken(self, silent_s: Mapping[str, float]) -> Mapping[str, str]:
        """Did the scheduler take them without a warning? Not known is as good as no."""
        assert self.backend.successors is not None
        asking = self.worker(self.backend.successors.taken, self.job.launch, silent_s)
        try:
            return await asyncio.wait_for(asking, TAKEN_S)
        except (BackendError, TimeoutError) as exc:
            log.warning("whether %s were taken is not known: %s", ", ".join(silent_s), exc)
            return {}

    async def _alone(self, hosts: Sequence[str], lost: Sequence[str]) -> float | None:
        """No other agent is heard. Is this host the one that was cut off from all? For how long it
        heard the scheduler no more than them; None where this leader is to leave.

        The scheduler is asked about this host first. While it cannot be heard either, nobody is
        blamed, and whoever takes over in another place ends this leader by the fence. Once it
        answers, agents that live are about to be heard again as well.
        """
        begun, cut_off_s = self.clock.monotonic(), 0.0
        granted = self.backend.granted
        if granted is None:
            return cut_off_s  # all agents run on this machine: nothing can be cut off
        while (waited_s := self.clock.monotonic() - begun) < CUT_OFF_S:
            try:
                own = await self.worker(granted.own_run, self.job.launch, hosts)
            except Unanswered as exc:
                log.error("no other agent is heard, nor the scheduler: cut off? %s", exc)
                cut_off_s = waited_s + CUT_OFF_POLL_S
                self.in_touch.clear()
            except BackendError as exc:
                log.error("what the scheduler holds against this host is not known: %s", exc)
                return cut_off_s
            else:
                if why := no_more_of_it(own, self.host):
                    self.gives_up(why)
                    return None
                if own.phase == "running":
                    if cut_off_s:
                        await self._listen(lost)
                    return cut_off_s
                # Its end, or its requeue: which of them is known in a moment.
            await asyncio.sleep(CUT_OFF_POLL_S)
        return cut_off_s

    async def _listen(self, hosts: Sequence[str]) -> None:
        """Until the agents of these hosts are heard again, or for as long as that may take."""
        until = self.clock.monotonic() + self.job.launch.agent_timeout + LISTEN_S
        log.warning("the scheduler is heard again: listening to %s", ", ".join(hosts))
        while self.clock.monotonic() < until and {*hosts} - {*self.sessions.by_host}:
            await asyncio.sleep(CHECK_POLL_S)

    async def look_at(self, register: Register) -> tuple[Finding, ...]:
        """What only two hosts can see of one: is its clock right, does its name lead to it?"""
        agent = register.agent
        skew = clock_skew(agent.host, register.sent_at, self.clock.now())
        name = await self._look_up(agent) if self.names_resolve else None
        files = self._own_files() if agent.host == self.host else None
        return tuple(finding for finding in (skew, name, files) if finding is not None)

    def _own_files(self) -> Finding | None:
        """Too few stop nobody: not all may come to need theirs at a time."""
        launch = self.job.launch
        hosts = len(launch.hosts)
        found = judge_files(files_needed(hosts, hosts * launch.devices_per_host))
        return found if found.verdict == "warns" else None

    async def _look_up(self, agent: AgentRegistered) -> Finding | None:
        patience_s = min(NAME_S, self.job.launch.agent_timeout / 2)  # it is not heard meanwhile
        return await looked_up(agent.host, agent.address, "the leader's host", patience_s)

    async def call(self, action: ReplaceAgent | CheckHosts | Replan) -> None:
        match action:
            case ReplaceAgent():
                await self._replace_agent(action)
            case CheckHosts():
                await self._check_hosts(action)
            case Replan():
                await self._replan(action)

    async def ask_why(self, signal_name: str) -> None:
        cause: Cause
        if self.backend.granted is None:
            # Without a scheduler only a person sends signals, to end the job.
            self.happened(LeaveAsked(at=self.now(), cause="cancelled", words=signal_name))
            return
        try:
            cause = await self.worker(self.granted.why_ending, self.job.launch)
        except BackendError as exc:
            log.error("the scheduler does not say why it sent %s: %s", signal_name, exc)
            cause = "unknown"
        words = signal_name
        if cause == "failed":
            words = await self._in_the_schedulers_words() or signal_name
            await self._take_back()
        self.happened(LeaveAsked(at=self.now(), cause=cause, words=words))

    async def _take_back(self) -> None:
        """Have the job queued again while there is somebody to ask for it: the scheduler is ending
        this run, and may kill the leader before the ranks have written their checkpoint. What the
        next run does without is said when they have."""
        try:
            await self.worker(self.granted.requeue, self.job.launch, ())
        except BackendError as exc:
            log.error("the job is not queued again yet: %s", exc)

    async def _in_the_schedulers_words(self) -> str | None:
        with contextlib.suppress(BackendError):
            return await self.worker(self.granted.standing, self.job.launch)
        return None

    async def hear_notices(self) -> None:
        """Ask now and then what the scheduler holds against the hosts; tell what is new."""
        told: set[str] = set()
        while True:
            await self._next_question()
            hosts = asked_about(self.run())
            try:
                found = await self.worker(self.granted.notices, self.job.launch, hosts)
            except BackendError as exc:
                log.warning("the scheduler does not answer: %s", exc)
                continue
            for event in news(self.run(), hosts, told, found, self.now()):
                self.happened(event)
            told = heard(found)
            await self._hear_of_unbegun(unheard(self.run()))

    async def _hear_of_unbegun(self, hosts: Sequence[str]) -> None:
        """Which of the hosts that no agent has come from cannot have one."""
        fixed_hosts = self.backend.fixed_hosts
        if not hosts or fixed_hosts is None:
            return
        try:
            found = await self.worker(fixed_hosts.unbegun, self.job.launch, hosts)
        except BackendError as exc:
            log.warning("whether agents can begin on %s is not known: %s", ", ".join(hosts), exc)
            return
        for host, why in found.items():
            self.happened(HostUnavailable(at=self.now(), host=host, why=why))

    async def _next_question(self) -> None:
        """Wait until it is time for it, which changes with what happens meanwhile."""
        asked = self.clock.monotonic()
        while (left := asked + next_question_s(self.run()) - self.clock.monotonic()) > 0:
            await asyncio.sleep(min(left, HURRY_S))

    async def _replace_agent(self, action: ReplaceAgent) -> None:
        """Ask the backend; one that fails silently is found out by the agent's absence.

        The leader's own agent lives in this process, and comes back by itself when its connection
        broke: to replace it would end the leader.
        """
        if action.host == self.host and not action.elsewhere:
            return
        try:
            silent_s = self.sessions.silent_for(action.host)
            await self.worker(
                partial(
                    self.backend.replace,
                    self.job.launch,
                    action.host,
                    elsewhere=action.elsewhere,
                    shut=action.shut,
                    silent_s=silent_s,
                )
            )
        except (Unanswered, Ended) as exc:
            log.error("whether %s can have a new agent is not known: %s", action.host, exc)
        except BackendError as exc:
            if isinstance(exc, MustLeave) and action.host in self.sessions.by_host:
                # It ends by itself, with the code for which the scheduler starts another one.
                log.warning("%s: so it is told to leave (%s)", exc.message, action.reason)
                self.sessions.order(action.host, Leave(reason=action.reason, again=True))
                return
            log.error("no new agent for %s: %s", action.host, exc)
            why = f"no agent can be had there: {exc.message}"
            self.happened(HostUnavailable(at=self.now(), host=action.host, why=why))

    async def _check_hosts(self, action: CheckHosts) -> None:
        """Have the hosts try a small all-reduce, and judge from what they say."""
        self.checked.clear()
        # The leader's own comes first, as it is the leader that finds a free port.
        hosts = tuple(sorted(action.hosts, key=lambda host: host != self.host))
        port = free_port(self.address)
        first = self.run().hosts.by_name[hosts[0]].address
        for rank, host in enumerate(hosts):
            order = CheckFabric(
                check=action.check,
                rank=rank,
                hosts=hosts,
                master_address=first,
                master_port=port,
                timeout_s=action.timeout_s,
            )
            self.sessions.order(host, order)
        deadline = self.clock.monotonic() + action.timeout_s + CHECK_SLACK_S
        reports: dict[str, Checked] = {}
        while len(reports) < len(hosts) and self.clock.monotonic() < deadline:
            await asyncio.sleep(CHECK_POLL_S)
            reports = {h: r for h, r in self.checked.items() if r.check == action.check}
        unfit = judge(hosts, reports)
        self.happened(HostsChecked(at=self.now(), check=action.check, unfit=unfit))

    async def _replan(self, action: Replan) -> None:
        try:
            run = self.run()
            hosts, switches = usable(run), switches_of(run)
            if action.device_bytes is not None:
                short = Shortage(
                    device_bytes=action.device_bytes, adopt=action.adopt, words=action.reason
                )
                return await self._refit(run, short)
            found = await self.worker(self.replanner, run.full.plan, hosts, switches)
        except (NdctlError, OSError) as exc:
            log.error("no plan for %s hosts: %s", action.hosts, exc)
            why = str(exc).split("\n")[0]
            refused = ReplanRefused(
                at=self.now(), hosts=action.hosts, why=why, device_bytes=action.device_bytes
            )
            self.happened(refused)
        else:
            self.happened(Replanned(at=self.now(), plan=found.plan, plan_number=found.number))

    async def _refit(self, run: Run, short: Shortage) -> None:
        found = await self.worker(self.refitter, run.plan, usable(run), switches_of(run), short)
        at, size = self.now(), short.device_bytes
        if found.found is None:
            hosts = len(run.plan.hosts)
            refused = ReplanRefused(
                at=at,
                hosts=hosts,
                why=found.why,
                device_bytes=size,
                ways=found.ways,
                edits=found.edits,
            )
            self.happened(refused)
            return
        plan, number = found.found.plan, found.found.number
        self.happened(
            Replanned(at=at, plan=plan, plan_number=number, device_bytes=size, why=found.why)
        )

    async def requeue(self, action: Requeue) -> bool:
        """Until the scheduler takes it: meanwhile the hosts stand idle, and no rank runs. False
        where it never will, which is told."""
        if self.backend.granted is None:
            why = "this machine has no queue to return to"
            self.happened(RequeueRefused(at=self.now(), why=why, cancelled=False))
            return False
        requeued = partial(self.granted.requeue, again=action.again, whole=action.whole)
        refused_at: float | None = None
        while True:
            try:
                await self.worker(requeued, self.job.launch, action.exclude)
                return True
            except Ended as exc:
                log.error("the job is not queued again: %s", exc)
                await self._tell_refusal(exc, over=True)
                return False
            except Unanswered as exc:
                log.error("the job is not queued again yet, asking again: %s", exc)
                refused_at = None
            except BackendError as exc:
                log.error("the scheduler does not take the job back, asking again: %s", exc)
                now = self.clock.monotonic()
                refused_at = now if refused_at is None else refused_at
                if now - refused_at >= REFUSED_S:
                    await self._tell_refusal(exc, over=False)
                    return False
            await asyncio.sleep(REQUEUE_RETRY_S)

    async def release(self) -> None:
        """At the end of the job; what cannot be given back then ends at its time limit."""
        if self.backend.unattended is None:
            return
        try:
            await self.worker(self.backend.unattended.release, self.job.launch)
        except BackendError as exc:
            log.error("whether the hosts are given back is not known: %s", exc)

    async def _tell_refusal(self, why: BackendError, *, over: bool) -> None:
        """A job that has ended may have been cancelled, which is no failure."""
        cause: Cause = "unknown"
        if over:
            with contextlib.suppress(BackendError):
                cause = await self.worker(self.granted.why_ending, self.job.launch)
        cancelled = cause == "cancelled"
        self.happened(RequeueRefused(at=self.now(), why=why.message, cancelled=cancelled))
