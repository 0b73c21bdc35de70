"""The leader's slow calls: it asks the scheduler, checks the hosts, or looks for a smaller plan.

They run beside the decisions, which must not wait for them. Their results are events.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

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
"""Limit for late reports after the time of a check is over."""
REQUEUE_RETRY_S = 5.0
TAKEN_S = 5.0
"""Limit for the scheduler to say whether it took a host. The report of the loss waits for it."""
CUT_OFF_S = 300.0
"""How long a leader that hears neither agents nor scheduler waits to be replaced. It is Slurm's
default of SlurmdTimeout, after which Slurm gives up a node."""
CUT_OFF_POLL_S = 2.0
LISTEN_S = 3.0
"""When the scheduler is reachable again, live agents have this and `agent_timeout` to reconnect."""

Refitter = Callable[[Plan, Sequence[str], Mapping[str, tuple[str, ...]], Shortage], Refit]
"""Takes a plan that did not fit, the available hosts, the switches above them, and the memory
shortage. Returns what helps. Raises PlanError."""
Replanner = Callable[[Plan, Sequence[str], Mapping[str, tuple[str, ...]]], JobPlan]
"""Takes a plan, the remaining hosts and the switches above them. Returns a plan for at most these
hosts. Raises PlanError."""


class Planners(Struct, frozen=True, kw_only=True):
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
        free_port: Callable[[str], int] = free_port,
    ) -> None:
        self.worker, self.free_port = worker, free_port
        self.job = job
        self.run = run
        self.sessions = sessions
        self.backend = backend
        self.replanner, self.refitter = planners.fewer, planners.less
        self.clock = clock
        self.happened = happened
        self.gives_up = gives_up
        """Has the leader exit without ending the job, because another process leads it."""
        self.in_touch = in_touch
        """Cleared while neither agents nor scheduler are heard."""
        self.now = now
        self.host = self.address = ""
        """Of the leader; set when it serves."""
        self.names_resolve = names_resolve
        self.told: set[str] = set()
        """Hosts that the scheduler held something against when it was last asked."""
        self.checked: dict[str, Checked] = {}
        """Host -> its report of the present check."""

    @property
    def granted(self) -> GrantingScheduler:
        """Only for jobs with an allocation."""
        assert self.backend.granted is not None
        return self.backend.granted

    async def lose(self, lost: Sequence[AgentLost], hosts: Sequence[str]) -> None:
        """Report agents that fell silent, unless they reconnect first.

        Args:
            hosts: all hosts of the job, if all agents but the leader's own fell silent; else empty.
        """
        try:
            names = [event.host for event in lost]
            cut_off_s = await self._alone(hosts, names) if hosts else 0.0
            if cut_off_s is not None:
                await self._report_lost(lost, cut_off_s)
        finally:
            self.in_touch.set()

    async def _report_lost(self, lost: Sequence[AgentLost], cut_off_s: float) -> None:
        silent_s = {event.host: event.silent_s for event in lost}
        taken = await self._taken(silent_s) if has_successors(self.run()) else {}
        for event in lost:
            if event.host not in self.sessions.by_host:  # else it has reconnected
                known = taken.get(event.host, "")
                self.happened(replace(event, taken=known, cut_off_s=cut_off_s))

    async def taken_before(self, host: str, silent_s: float) -> str:
        """Why the scheduler took the former agent of `host`; empty if it did not, or if that is
        unknown. Called when a new agent connects before the silence of the former was noticed."""
        known = self.run().hosts.by_name.get(host)
        # If the loss of the former agent is known, the scheduler was asked then. Only a scheduler
        # that replaces hosts takes them without a warning.
        if known is None or not known.alive or not has_successors(self.run()):
            return ""
        return (await self._taken({host: silent_s})).get(host, "")

    async def _taken(self, silent_s: Mapping[str, float]) -> Mapping[str, str]:
        """Hosts that the scheduler took without a warning -> why. Empty if that is unknown."""
        assert self.backend.successors is not None
        asking = self.worker(self.backend.successors.taken, self.job.launch, silent_s)
        try:
            return await asyncio.wait_for(asking, TAKEN_S)
        # The loss is reported without the answer: then it counts as a failure of the host.
        except (BackendError, TimeoutError) as exc:
            hosts = ", ".join(silent_s)
            log.warning("failed to ask whether the scheduler took %s: %s", hosts, exc)
            return {}

    async def _alone(self, hosts: Sequence[str], lost: Sequence[str]) -> float | None:
        """Find out whether this host was cut off from the network, because all agents are silent.

        While the scheduler is unreachable too, no host is reported as lost: this leader may be the
        one that was cut off. Then another leader takes over, and the fence ends this one. When the
        scheduler or an agent of another host is heard again, live agents can reconnect as well.

        Returns the seconds for which the scheduler was unreachable, or None if this leader must
        exit.
        """
        begun, cut_off_s = self.clock.monotonic(), 0.0
        granted = self.backend.granted
        if granted is None:
            return cut_off_s  # all agents run on this machine: nothing can be cut off
        while (waited_s := self.clock.monotonic() - begun) < CUT_OFF_S:
            # The cut is over even if the scheduler is still down: agents wait for decisions.
            if cut_off_s and await self._hears_others_again(lost):
                return cut_off_s
            try:
                own = await self.worker(granted.own_run, self.job.launch, hosts)
            except Unanswered as exc:
                log.error("all agents are silent and the scheduler is unreachable: %s", exc)
                cut_off_s = waited_s + CUT_OFF_POLL_S
                self.in_touch.clear()
            # The scheduler is reachable, so this host is not cut off: the other agents are lost.
            except BackendError as exc:
                log.error("failed to ask the scheduler about this host: %s", exc)
                return cut_off_s
            else:
                if why := no_more_of_it(own, self.host):
                    self.gives_up(why)
                    return None
                if own.phase == "running":
                    if cut_off_s:
                        await self._listen(lost, "the scheduler is reachable again")
                    return cut_off_s
                # The run ends or is being requeued. The scheduler can tell which in a moment.
            await asyncio.sleep(CUT_OFF_POLL_S)
        return cut_off_s

    async def _hears_others_again(self, lost: Sequence[str]) -> bool:
        """Whether agents of other hosts are heard. The rest has time to reconnect too, in which the
        first one must not be lost again."""
        if not {*self.sessions.by_host} - {self.host}:
            return False
        await self._listen(lost, "an agent is heard again")
        return bool({*self.sessions.by_host} - {self.host})

    async def _listen(self, hosts: Sequence[str], why: str) -> None:
        """Wait until the agents of these hosts have reconnected, or until their time is over."""
        until = self.clock.monotonic() + self.job.launch.agent_timeout + LISTEN_S
        log.warning("%s: waiting for agents of %s", why, ", ".join(hosts))
        while self.clock.monotonic() < until and {*hosts} - {*self.sessions.by_host}:
            await asyncio.sleep(CHECK_POLL_S)

    async def look_at(self, register: Register) -> tuple[Finding, ...]:
        """Problems of a new agent's host that need a second host to see: its clock and its name."""
        agent = register.agent
        skew = clock_skew(agent.host, register.sent_at, self.clock.now())
        name = await self._look_up(agent) if self.names_resolve else None
        files = self._own_files() if agent.host == self.host else None
        return tuple(finding for finding in (skew, name, files) if finding is not None)

    def _own_files(self) -> Finding | None:
        """Whether the limit of open files is too low. Only a warning: not all hosts may need their
        files at the same time."""
        launch = self.job.launch
        hosts = len(launch.hosts)
        found = judge_files(files_needed(hosts, hosts * launch.devices_per_host))
        return found if found.verdict == "warns" else None

    async def _look_up(self, agent: AgentRegistered) -> Finding | None:
        # Below `agent_timeout`, because the leader does not read the agent's messages meanwhile.
        patience_s = min(NAME_S, self.job.launch.agent_timeout / 2)
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
            log.error("failed to ask the scheduler why it sent %s: %s", signal_name, exc)
            cause = "unknown"
        words = signal_name
        if cause == "failed":  # for example a node failed
            # The words tell what failed, for example which node. The signal alone does not.
            words = await self._schedulers_words() or signal_name
            await self._requeue_early()
        self.happened(LeaveAsked(at=self.now(), cause=cause, words=words))

    async def _requeue_early(self) -> None:
        """Requeue the job at once. The scheduler is ending this run, and may kill the leader before
        the ranks have written their checkpoint. The hosts to exclude are set at the later requeue.
        """
        try:
            await self.worker(self.granted.requeue, self.job.launch, ())
        except BackendError as exc:
            log.error("failed to requeue the job, will try again: %s", exc)

    async def _schedulers_words(self) -> str | None:
        with contextlib.suppress(BackendError):
            return await self.worker(self.granted.standing, self.job.launch)
        return None

    async def hear_notices(self) -> None:
        """Ask the scheduler now and then which hosts it drains or has lost, and report news."""
        while True:
            await self._next_question()
            await self.ask_notices()

    async def ask_notices(self) -> None:
        """Ask the scheduler once which hosts it drains or has lost, and report news."""
        hosts = asked_about(self.run())
        try:
            found = await self.worker(self.granted.notices, self.job.launch, hosts)
        except BackendError as exc:
            log.warning("failed to ask the scheduler about the hosts: %s", exc)
            return
        for event in news(self.run(), hosts, self.told, found, self.now()):
            self.happened(event)
        self.told = heard(found)
        await self._hear_of_unbegun(unheard(self.run()))

    async def _hear_of_unbegun(self, hosts: Sequence[str]) -> None:
        """Report which of `hosts`, from which no agent has connected, cannot start one."""
        fixed_hosts = self.backend.fixed_hosts
        if not hosts or fixed_hosts is None:
            return
        try:
            found = await self.worker(fixed_hosts.unbegun, self.job.launch, hosts)
        except BackendError as exc:
            names = ", ".join(hosts)
            log.warning("failed to ask whether agents can start on %s: %s", names, exc)
            return
        for host, why in found.items():
            self.happened(HostUnavailable(at=self.now(), host=host, why=why))

    async def _next_question(self) -> None:
        """Wait until the next question to the scheduler is due. The interval depends on the job's
        state, which may change meanwhile."""
        asked = self.clock.monotonic()
        while (left := asked + next_question_s(self.run()) - self.clock.monotonic()) > 0:
            await asyncio.sleep(min(left, HURRY_S))

    async def _replace_agent(self, action: ReplaceAgent) -> None:
        """Ask the backend for a new agent. If the start fails silently, the agent never connects
        and the supervisor notices that."""
        # The leader's own agent runs in this process and reconnects by itself. Replacing it on this
        # host would end the leader.
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
            # Neither error is about the host, so the host is not reported as unavailable.
            log.error("failed to ask for a new agent on %s: %s", action.host, exc)
        except BackendError as exc:
            if isinstance(exc, MustLeave) and action.host in self.sessions.by_host:
                # The agent must exit by itself, with the exit code at which the scheduler starts
                # another one.
                log.warning("%s: ordering the agent to exit (%s)", exc.message, action.reason)
                self.sessions.order(action.host, Leave(reason=action.reason, again=True))
                return
            log.error("failed to start a new agent on %s: %s", action.host, exc)
            why = f"no agent can be started there: {exc.message}"
            self.happened(HostUnavailable(at=self.now(), host=action.host, why=why))

    async def _check_hosts(self, action: CheckHosts) -> None:
        """Have the hosts run a small all-reduce, and find the unfit hosts from their reports."""
        self.checked.clear()
        # The leader's host is rank 0, because the leader finds the free port for the rendezvous.
        hosts = tuple(sorted(action.hosts, key=lambda host: host != self.host))
        port = self.free_port(self.address)
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
            # A late report of an earlier check does not count.
            reports = {h: r for h, r in self.checked.items() if r.check == action.check}
        unfit = judge(hosts, reports)
        self.happened(HostsChecked(at=self.now(), check=action.check, unfit=unfit))

    async def _replan(self, action: Replan) -> None:
        try:
            run = self.run()
            hosts, switches = usable(run), switches_of(run)
            # The hosts are all there, but a rank ran out of device memory. So a plan that needs
            # less is looked for.
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
        """Requeue the job; retries until the scheduler accepts it. No rank runs meanwhile. Returns
        False, and reports it, if the scheduler never will."""
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
                log.error("failed to requeue the job, because it has ended: %s", exc)
                await self._report_refusal(exc, over=True)
                return False
            except Unanswered as exc:
                # An unreachable scheduler has refused nothing, so keep trying without a limit.
                log.error("failed to reach the scheduler to requeue the job, retrying: %s", exc)
                refused_at = None
            except BackendError as exc:
                # A refusal may be temporary. Only when it lasts for REFUSED_S does the job end.
                log.error("the scheduler refused to requeue the job, retrying: %s", exc)
                now = self.clock.monotonic()
                refused_at = now if refused_at is None else refused_at
                if now - refused_at >= REFUSED_S:
                    await self._report_refusal(exc, over=False)
                    return False
            await asyncio.sleep(REQUEUE_RETRY_S)

    async def release(self) -> None:
        """Release the hosts at the end of the job. If that fails, their time limit ends them."""
        if self.backend.unattended is None:
            return
        try:
            await self.worker(self.backend.unattended.release, self.job.launch)
        except BackendError as exc:
            log.error("failed to release the hosts: %s", exc)

    async def _report_refusal(self, why: BackendError, *, over: bool) -> None:
        cause: Cause = "unknown"
        if over:
            # Somebody may have cancelled the job in the scheduler, which is not a failure.
            with contextlib.suppress(BackendError):
                cause = await self.worker(self.granted.why_ending, self.job.launch)
        cancelled = cause == "cancelled"
        self.happened(RequeueRefused(at=self.now(), why=why.message, cancelled=cancelled))
