"""What a leader has done beside its decisions, as `leader/backend_calls.py`, in virtual time."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from orchestrator.contract.launch import Cause
from orchestrator.contract.messages.actions import CheckHosts, ReplaceAgent, Replan, Requeue
from orchestrator.contract.messages.agent_protocol import Checked, CheckFabric
from orchestrator.contract.messages.events import (
    AgentLost,
    HostsChecked,
    HostUnavailable,
    LeaveAsked,
    Replanned,
    ReplanRefused,
)
from orchestrator.contract.plan import Plan
from orchestrator.detect.fabric import judge
from orchestrator.errors import BackendError, PlanError, Unanswered
from orchestrator.failover.after_leader import no_more_of_it
from orchestrator.job.hosts.scheduler_notices import asked_about, heard, news, next_question_s
from orchestrator.seams import CurrentRun
from orchestrator.simulation.world.jobs import plan_for
from orchestrator.simulation.world.k8s_operator import Operators

if TYPE_CHECKING:
    from orchestrator.simulation.leaders import Leader
    from orchestrator.simulation.world.world import World

CHECK_POLL_S = 0.5
CHECK_SLACK_S = 5.0
REQUEUE_RETRY_S = 5.0
CUT_OFF_S = 300.0
CUT_OFF_POLL_S = 2.0
LISTEN_S = 3.0
ANSWER_S = 0.5
"""For the scheduler to answer."""
REPLAN_S = 1.0


class Errands:
    def __init__(self, world: "World", leader: "Leader") -> None:
        self.world, self.leader = world, leader
        self.checked: dict[str, Checked] = {}
        self.told: set[str] = set()
        self.in_touch = True
        """Not while neither agents nor scheduler are heard: then nothing is decided."""

    def _after(self, seconds: float, do: "partial[None]") -> None:
        self.world.timeline.after(seconds, partial(self._if_alive, do))

    def _if_alive(self, do: "partial[None]") -> None:
        if self.leader.alive:
            do()

    def lose(self, lost: Sequence[AgentLost], *, alone: bool) -> None:
        if alone:
            self._alone(lost, self.world.timeline.now, 0.0)
        else:
            self._lose(lost, 0.0)

    def _alone(self, lost: Sequence[AgentLost], begun: float, cut_off_s: float) -> None:
        """While neither agents nor scheduler are heard, nobody is blamed; once the scheduler is,
        it is asked about this host, and agents are listened to again."""
        waited_s = self.world.timeline.now - begun
        try:
            own = self._own_run()
        except Unanswered:
            own, cut_off_s = None, waited_s + CUT_OFF_POLL_S
            self.in_touch = False
        except BackendError:
            self._lose(lost, cut_off_s)
            return
        if own is not None and (why := no_more_of_it(own, self.leader.host.name)):
            self.leader.leave(why)
        elif own is not None and own.phase == "running":
            listens_s = self.world.job.agent_timeout + LISTEN_S if cut_off_s else 0.0
            self._after(listens_s, partial(self._lose, lost, cut_off_s))
        elif waited_s < CUT_OFF_S:
            self._after(CUT_OFF_POLL_S, partial(self._alone, lost, begun, cut_off_s))
        else:
            self._lose(lost, cut_off_s)

    def _own_run(self) -> CurrentRun:
        host, scheduler = self.leader.host.name, self.world.scheduler
        if isinstance(scheduler, Operators):
            scheduler.notices(host, ())
            return CurrentRun(phase="running", words="it answers")
        return scheduler.own_run(host, self.leader.agent)

    def taken_before(self, host: str, silent_s: float) -> str:
        known, scheduler = self.leader.supervisor.run.hosts.by_name.get(host), self.world.scheduler
        if known is None or not known.alive or not isinstance(scheduler, Operators):
            return ""
        with contextlib.suppress(Unanswered):
            return scheduler.taken(self.leader.host.name, {host: silent_s}).get(host, "")
        return ""

    def _lose(self, lost: Sequence[AgentLost], cut_off_s: float) -> None:
        lost = [replace(event, cut_off_s=cut_off_s) for event in lost]
        self.in_touch = True
        if isinstance(self.world.scheduler, Operators):
            self._after(ANSWER_S, partial(self._lost, lost, self.world.scheduler))
        else:
            self._lost(lost, None)

    def _lost(self, lost: Sequence[AgentLost], operators: Operators | None) -> None:
        """Those that are not heard again meanwhile; and did the scheduler take them?"""
        silent_s = {event.host: event.silent_s for event in lost}
        taken: dict[str, str] = {}
        if operators is not None:
            with contextlib.suppress(Unanswered):
                taken = operators.taken(self.leader.host.name, silent_s)
        for event in lost:
            if event.host not in self.leader.connections.by_host:
                self.leader.happened(replace(event, taken=taken.get(event.host, "")))

    def run_errand(self, action: ReplaceAgent | CheckHosts | Replan) -> None:
        match action:
            case ReplaceAgent():
                self._after(ANSWER_S, partial(self._replace_agent, action))
            case CheckHosts():
                self._check_hosts(action)
            case Replan():
                self._after(REPLAN_S, partial(self._replan, action))

    def ask_why(self, signal_name: str) -> None:
        self._after(ANSWER_S, partial(self._asked_why, signal_name))

    def _asked_why(self, signal_name: str) -> None:
        cause: Cause
        try:
            cause = self.world.scheduler.why_ending(self.leader.host.name, self.leader.agent)
        except BackendError:
            cause = "unknown"
        self.leader.happened(LeaveAsked(at=self.leader.now(), cause=cause, words=signal_name))

    def hear_notices(self) -> None:
        """When the next question is due is decided at the one before, not meanwhile as well."""
        due_s = next_question_s(self.leader.supervisor.run)
        self._after(due_s, partial(self._hear_notices))

    def _hear_notices(self) -> None:
        self.hear_notices()
        self._ask_notices()

    def hear_notices_now(self) -> None:
        self._after(0.0, partial(self._ask_notices))

    def _ask_notices(self) -> None:
        run = self.leader.supervisor.run
        hosts = asked_about(run)
        try:
            found = self.world.scheduler.notices(self.leader.host.name, hosts)
        except BackendError:
            return
        for event in news(run, hosts, self.told, found, self.leader.now()):
            self.leader.happened(event)
        self.told = heard(found)

    def _replace_agent(self, action: ReplaceAgent) -> None:
        if action.host == self.leader.host.name and not action.elsewhere:
            return
        try:
            silent_s = self.leader.connections.silent_for(action.host)
            self.world.replace_agent(
                self.leader,
                action.host,
                elsewhere=action.elsewhere,
                shut=action.shut,
                silent_s=silent_s,
            )
        except Unanswered:
            pass
        except BackendError as exc:
            why = f"no agent can be had there: {exc.message}"
            self.leader.happened(HostUnavailable(at=self.leader.now(), host=action.host, why=why))

    def _check_hosts(self, action: CheckHosts) -> None:
        self.checked.clear()
        hosts = tuple(sorted(action.hosts, key=lambda host: host != self.leader.host.name))
        for rank, host in enumerate(hosts):
            order = CheckFabric(
                check=action.check,
                rank=rank,
                hosts=hosts,
                master_address=hosts[0],
                master_port=29500,
                timeout_s=action.timeout_s,
            )
            self.leader.order(host, order)
        deadline = self.world.timeline.now + action.timeout_s + CHECK_SLACK_S
        self._after(CHECK_POLL_S, partial(self._judge, action.check, hosts, deadline))

    def _judge(self, check: int, hosts: tuple[str, ...], deadline: float) -> None:
        reports = {h: r for h, r in self.checked.items() if r.check == check}
        if len(reports) < len(hosts) and self.world.timeline.now < deadline:
            self._after(CHECK_POLL_S, partial(self._judge, check, hosts, deadline))
            return
        unfit = judge(hosts, reports)
        self.leader.happened(HostsChecked(at=self.leader.now(), check=check, unfit=unfit))

    def _replan(self, action: Replan) -> None:
        at, each = self.leader.now(), self.world.scenario.ranks_per_host
        if action.device_bytes is not None:
            self._refit(action, action.device_bytes)
            return
        try:
            smaller = smaller_plan(action.hosts, self.world.scenario.min_hosts, each)
        except PlanError as exc:
            why = exc.message
            self.leader.happened(ReplanRefused(at=at, hosts=action.hosts, why=why))
        else:
            number = self.world.number_of(smaller)
            self.leader.happened(Replanned(at=at, plan=smaller, plan_number=number))

    def _refit(self, action: Replan, size: int) -> None:
        """The real planner's plan for so much memory; what else could be changed is not asked."""
        at, each, why = self.leader.now(), self.world.scenario.ranks_per_host, "on_oom is stop"
        try:
            found = plan_for(action.hosts, each, size) if action.adopt else None
        except PlanError as exc:
            found, why = None, exc.message
        if found is None:
            refused = ReplanRefused(at=at, hosts=action.hosts, why=why, device_bytes=size)
            self.leader.happened(refused)
            return
        number = self.world.number_of(found)
        self.leader.happened(
            Replanned(at=at, plan=found, plan_number=number, device_bytes=size, why="refitted")
        )

    def requeue(self, action: Requeue) -> None:
        """Until the scheduler takes it."""
        self.world.scheduler.requeue(
            self.leader.host.name,
            self.leader.agent,
            action.exclude,
            partial(self._requeued, action),
            again=action.again,
            whole=action.whole,
        )

    def _requeued(self, action: Requeue, taken: bool) -> None:
        if not self.leader.alive:
            return
        if taken:
            self.leader.end(action)
        else:
            self._after(REQUEUE_RETRY_S, partial(self.requeue, action))


@lru_cache(maxsize=256)
def smaller_plan(hosts: int, min_hosts: int, each: int) -> Plan:
    """As `app/planning/replan.py`: the real planner's plan for as many `hosts` as can be used."""
    first: PlanError | None = None
    for count in range(hosts, min_hosts - 1, -1):
        try:
            return plan_for(count, each)
        except PlanError as exc:
            first = first or exc
    raise first or PlanError(f"{hosts} hosts are fewer than resilience.min_hosts")
