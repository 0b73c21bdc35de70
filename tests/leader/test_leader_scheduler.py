"""The real leader between a fake scheduler and agents that the test plays."""

import asyncio
import resource
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.fence import Fence, read_fence, write_fence
from orchestrator.contract.launch import Allocation, Cause
from orchestrator.contract.messages.actions import ReplaceAgent, Requeue
from orchestrator.contract.messages.agent_protocol import (
    Checked,
    CheckFabric,
    Leave,
    OfferPort,
    Port,
    Register,
    Start,
    Stop,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    HostFlagged,
    HostOpened,
    HostsChecked,
    HostUnavailable,
    LeaveAsked,
    RankExited,
    Replanned,
    ReplanRefused,
    RequeueRefused,
)
from orchestrator.errors import BackendError, Ended, SpecError
from orchestrator.job.plans import JobPlan
from orchestrator.job.state import Run
from orchestrator.leader.backend_calls import LISTEN_S, BackendCalls
from orchestrator.leader.leader import FENCE_S
from orchestrator.posix.fd_limit import OWN
from orchestrator.seams import CurrentRun, HostNotice
from tests.agent.world import LAUNCH, WAIT_S, a_plan, until
from tests.leader.leader_world import (
    NAME,
    SILENT_S,
    FakeAgent,
    LedJob,
    exited,
    run_script,
    start_attempt,
    stopped,
)

GRANTED = Allocation(id="7", restarts=0, hosts=("host-0", "host-1"))


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that these tests must sit out are short."""
    monkeypatch.setattr("orchestrator.job.hosts.scheduler_notices.NOTICES_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.backend_calls.REQUEUE_RETRY_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.backend_calls.CUT_OFF_POLL_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.agent_sessions.RECONNECT_S", 0.05)


@pytest.mark.usefixtures("short_waits")
def test_a_job_that_is_asked_to_leave_is_queued_again_before_its_agents_leave(
    tmp_path: Path,
) -> None:
    async def script(job: LedJob) -> None:
        job.backend.cause, job.backend.busy = "preempted", 1
        zero, one = await job.start_both()
        job.leader.warned("SIGUSR2")
        for agent in (zero, one):
            assert (await agent.expect(Stop)).grace_s == 5.0
        await zero.send(stopped("host-0"))
        await one.send(stopped("host-1"))
        assert "preempted" in (await zero.expect(Leave)).reason
        assert len(job.backend.requeued) == 2, (
            "the request is repeated if the scheduler does not answer"
        )
        for agent in (zero, one):
            await agent.ws.close()
        assert isinstance(await asyncio.wait_for(job.task, WAIT_S), Requeue)
        assert [event.cause for event in job.events(LeaveAsked)] == [None, "preempted"]
        assert "over" not in (job.run_dir.leader).read_text(), "the next allocation has agents too"

    run_script(tmp_path, script, allocation=GRANTED)


DISABLED = "Slurm refuses `scontrol requeue 1`: Requested operation is disabled"


@pytest.mark.usefixtures("short_waits")
def test_a_job_ends_if_the_scheduler_keeps_refusing_the_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its hosts would stay idle until the time limit."""
    monkeypatch.setattr("orchestrator.leader.backend_calls.REFUSED_S", 5.0)

    async def script(job: LedJob) -> None:
        job.backend.refuses, job.backend.busy = BackendError(DISABLED), 1
        agents = await job.start_both()
        job.leader.warned("SIGUSR2")
        for agent in agents:
            await agent.expect(Stop)
            await agent.send(stopped(agent.host))
        await until(lambda: len(job.backend.requeued) >= 4, "the request to be repeated")
        assert job.events(RequeueRefused) == []
        job.clock.put_forward(5.0)
        for agent in agents:
            await agent.expect(Leave)
            await agent.ws.close()
        ending = await job.end()
        assert ending.state == "FAILED"
        assert DISABLED in ending.reason
        assert "resume with `ndctl submit SPEC --resume`" in ending.reason
        assert job.leader.supervisor.run.state == "FAILED"

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("cause", "state"), [("cancelled", "CANCELLED"), ("unknown", "FAILED")])
def test_a_requeue_of_a_job_that_the_scheduler_has_ended_is_requested_once(
    tmp_path: Path, cause: Cause, state: str
) -> None:
    async def script(job: LedJob) -> None:
        job.backend.refuses = Ended("Slurm job 7 has ended")
        zero, one = await job.start_both()
        job.backend.flagged = (HostNotice("host-1", "DRAINING", "bad fan"),)
        for agent in (zero, one):
            await agent.expect(Stop)
        job.backend.cause = cause
        for agent in (zero, one):
            await agent.send(stopped(agent.host))
        for agent in (zero, one):
            await agent.expect(Leave)
            await agent.ws.close()
        ending = await job.end()
        assert ending.state == state
        assert "Slurm job 7 has ended" in ending.reason
        assert len(job.backend.requeued) == 1

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_a_drained_host_gives_one_event(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        job.backend.flagged = (HostNotice("host-1", "DRAINING", "bad fan"),)
        for agent in (zero, one):
            assert (await agent.expect(Stop)).grace_s == 5.0
        await zero.send(stopped("host-0"))
        await one.send(stopped("host-1"))
        await zero.expect(Leave)
        assert job.backend.requeued == [("host-1",)]
        assert len(job.events(HostFlagged)) == 1

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_a_host_that_the_scheduler_opens_again_gives_one_event(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        job.backend.flagged = (HostNotice("host-1", "cordoned", ""),)
        for agent in (zero, one):
            await agent.expect(Stop)
            await agent.send(stopped(agent.host))
        await until(lambda: job.backend.moved, "a request for another host")
        job.backend.flagged = ()
        await job.wait_for_event(HostOpened)
        assert (await zero.expect(OfferPort)).attempt == 2
        asked = job.backend.asked
        await until(lambda: job.backend.asked > asked + 2, "the request to be repeated")
        opened = [event.host for event in job.events(HostOpened)]
        assert (opened, len(job.events(HostFlagged))) == (["host-1"], 1)

    run_script(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


def test_an_evicted_host_is_no_incident(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.backend.evicted = {"host-1": "Evicted"}
        zero, one = await job.start_both()
        await one.ws.close()
        await zero.expect(Stop)
        await zero.send(stopped("host-0"))
        lost = await job.wait_for_event(AgentLost)
        assert (lost.host, lost.taken) == ("host-1", "Evicted")
        assert job.leader.supervisor.run.history.incidents == ()

    run_script(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


def test_a_host_evicted_and_replaced_at_once_is_no_incident(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, _ = await job.start_both()
        job.backend.evicted = {"host-1": "Evicted"}
        await job.agent("host-1", pid=101)
        await zero.expect(Stop)
        await zero.send(stopped("host-0"))
        assert (await zero.expect(OfferPort)).attempt == 2
        registered = [(event.host, event.taken) for event in job.events(AgentRegistered)]
        assert sorted(registered[:2]) == [("host-0", ""), ("host-1", "")], (
            "the order of registration may vary"
        )
        assert registered[2:] == [("host-1", "Evicted")]
        assert job.leader.supervisor.run.history.incidents == ()

    run_script(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


@pytest.mark.usefixtures("short_waits")
def test_a_job_shrinks_if_no_agent_can_start_on_a_host(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.backend.broken = True
        job.backend.smaller = JobPlan(plan=a_plan(1), number=2)
        zero, one = await job.start_both()
        await one.ws.close()
        await zero.expect(Stop)
        await zero.send(stopped("host-0"))
        await zero.expect(OfferPort)
        await zero.send(Port(attempt=2, port=20_002))
        start = await zero.expect(Start)
        assert (start.nodes, start.config) == (1, str(job.run_dir.trainer_config(2)))
        assert job.events(HostUnavailable)[0].host == "host-1"
        assert job.events(Replanned)[0].plan_number == 2
        assert job.backend.left == ("host-0",)

    run_script(tmp_path, script, shrink=True)


@pytest.mark.usefixtures("short_waits")
def test_any_error_of_the_planner_is_reported_as_a_refusal(tmp_path: Path) -> None:
    """For example, the profile was in a file that does not exist any more."""

    def no_profile(*left: object) -> JobPlan:
        raise SpecError("no profile is called h100-of-ours")

    async def script(job: LedJob) -> None:
        job.backend.broken = True
        job.leader.backend_calls.replanner = no_profile
        zero, one = await job.start_both()
        await one.ws.close()
        await zero.expect(Stop)
        await zero.send(stopped("host-0"))
        refused = await job.wait_for_event(ReplanRefused)
        assert (refused.hosts, refused.why) == (1, "no profile is called h100-of-ours")

    run_script(tmp_path, script, shrink=True)


def test_hosts_check_their_links_and_the_missing_host_is_named(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        agents = [await job.agent(f"host-{n}") for n in range(3)]
        orders = [await agent.expect(CheckFabric) for agent in agents]
        assert orders[0].rank == 0, "the host of the leader offers the port"
        (hosts,) = {order.hosts for order in orders}
        assert sorted(hosts) == ["host-0", "host-1", "host-2"], "in the order of registration"
        missing = ("host-1",)
        for agent in (agents[0], agents[2]):
            waiting = Checked(check=1, host=agent.host, state="waited", waited_for=missing)
            await agent.send(waiting)
        no_profile = Checked(check=1, host="host-1", state="broke", why="no route")
        await agents[1].send(no_profile)
        checked = await job.wait_for_event(HostsChecked)
        assert checked.unfit == {"host-1": "no route"}
        await start_attempt(agents[0], agents[2], 1)

    three = replace(GRANTED, hosts=("host-0", "host-1", "host-2"))
    run_script(tmp_path, script, allocation=three, preflight=True)


def test_a_replaced_leader_does_not_write_the_journal(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        await job.start_both()
        fence = read_fence(job.run_dir.fence)
        assert fence == Fence(leader=NAME, attempt=1), (
            "the fence is raised before the attempt starts"
        )
        before = job.run_dir.journal.read_bytes()
        write_fence(job.run_dir.fence, Fence(leader="another", attempt=1))
        with pytest.raises(GivenUp):
            await asyncio.wait_for(job.task, WAIT_S)
        assert job.run_dir.journal.read_bytes() == before

    run_script(tmp_path, script)


def logs_contain(words: str, log: pytest.LogCaptureFixture) -> bool:
    return words in log.text


def test_a_leader_that_cannot_read_the_fence_delays_its_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(job: LedJob) -> None:
        zero, _ = await job.start_both()
        fence = job.run_dir.fence
        fence.unlink()
        fence.mkdir()
        await zero.send(exited(0, "host-0"))
        await until(lambda: "failed to write the journal" in caplog.text, "a failed write")
        before = job.run_dir.journal.read_bytes()
        caplog.clear()
        for waiting in ("failed to write the journal", "failed to read the fence"):
            await until(
                partial(logs_contain, waiting, caplog),
                "another write and another read of the fence",
            )
        assert not job.task.done()
        assert job.events(RankExited) == []
        assert job.run_dir.journal.read_bytes() == before
        fence.rmdir()
        write_fence(fence, Fence(leader=NAME, attempt=1))
        await zero.expect(Stop)

    run_script(tmp_path, script)


def test_a_replaced_leader_does_not_take_the_fence_back(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        another = Fence(leader="another", attempt=7)
        write_fence(job.run_dir.fence, another)
        with pytest.raises(GivenUp):
            await job.leader.right_to_lead.raise_fence(2)
        assert read_fence(job.run_dir.fence) == another

    run_script(tmp_path, script, allocation=GRANTED)


def test_the_agent_in_the_leaders_process_is_not_replaced(tmp_path: Path) -> None:
    """To end this agent would end the leader."""

    async def script(job: LedJob) -> None:
        for host in ("host-0", "host-1"):
            await job.leader.backend_calls.call(ReplaceAgent(host=host, reason="it was silent"))
        assert job.backend.replaced == ["host-1"]

    run_script(tmp_path, script)


def test_an_agent_whose_pod_cannot_be_deleted_is_ordered_to_leave(
    tmp_path: Path,
) -> None:
    """A Role cannot name the pod in advance, and no controller deletes it."""

    async def script(job: LedJob) -> None:
        job.backend.powerless = True
        one = await job.agent("host-1")
        await job.wait_for_event(AgentRegistered)
        order = ReplaceAgent(host="host-1", reason="host-1 failed its checks", elsewhere=True)
        await job.leader.backend_calls.call(order)
        opened = await one.expect(Leave)
        assert (opened.reason, opened.again) == ("host-1 failed its checks", True)
        assert job.events(HostUnavailable) == []

    run_script(tmp_path, script)


def test_backend_calls_survive_a_scheduler_that_is_down(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        calls: BackendCalls = job.leader.backend_calls
        job.backend.broken = True
        await calls.ask_why("SIGTERM")
        assert (await job.wait_for_event(LeaveAsked)).cause == "unknown"

    run_script(tmp_path, script, allocation=GRANTED)


def test_a_failed_allocation_is_requeued_at_once_before_ranks_have_stopped(tmp_path: Path) -> None:
    """Slurm ends the allocation, and may kill the leader before its ranks have stopped."""

    async def script(job: LedJob) -> None:
        job.backend.cause = "failed"
        job.backend.words = "Slurm job 7 is COMPLETING (JobLaunchFailure)"
        await job.start_both()
        job.leader.warned("SIGTERM")
        await until(lambda: len(job.events(LeaveAsked)) == 2, "the cause")
        assert job.events(LeaveAsked)[1].words == job.backend.words
        assert job.backend.requeued == [()]

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_a_leader_without_contact_to_agents_and_scheduler_declares_no_agent_lost(
    tmp_path: Path,
) -> None:
    """The leader is cut off from both. An agent that reconnects afterwards was never lost."""

    async def script(job: LedJob) -> None:
        job.backend.mute = True
        zero, one = await job.start_both()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 2, "the scheduler to be asked again")
        assert job.events(AgentLost) == []
        again = await job.agent("host-1")
        job.backend.mute = False
        await until(lambda: not job.leader.background, "the end of the backend call")
        assert job.events(AgentLost) == []
        await again.ws.close()
        assert (await job.wait_for_event(AgentLost)).host == "host-1", (
            "the scheduler answers now, so the agent is lost"
        )
        await zero.expect(Stop)

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_a_leader_that_hears_an_agent_again_decides_although_the_scheduler_is_down(
    tmp_path: Path,
) -> None:
    """Seed 105617 of the simulation: after a network cut the leader was silent for as long as the
    scheduler, so an agent that was still cut off took over from it."""

    async def script(job: LedJob) -> None:
        job.backend.mute = True
        zero, one = await job.start_both()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 2, "the scheduler to be asked again")
        await zero.send(exited(0, "host-0"))
        again = await job.agent("host-1")
        await job.wait_for_event(RankExited)
        for agent in (zero, again):
            await agent.expect(Stop)
        assert job.events(AgentLost) == []

    run_script(tmp_path, script, allocation=GRANTED)


REQUEUED = CurrentRun(phase="queued again", words="Slurm job 7 is PENDING (BeginTime)")
HOST_REMOVED = CurrentRun(
    phase="running",
    words="Slurm job 7 is RUNNING",
    given_up={"host-0": "Slurm removed it from the job"},
)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (REQUEUED, "Slurm job 7 is PENDING"),
        (HOST_REMOVED, "host-0, the leader's own host, is not part of the run"),
    ],
)
@pytest.mark.usefixtures("short_waits")
def test_a_leader_whose_own_host_was_removed_exits_without_an_event(
    tmp_path: Path, own: CurrentRun, why: str
) -> None:
    """It has no contact to agents: they requeue the job without this host."""

    async def script(job: LedJob) -> None:
        job.backend.own = own
        _, one = await job.start_both()
        lines = len(job.events(object))
        await one.ws.close()
        await until(lambda: job.leader.right_to_lead.outlived, "the answer of the scheduler")
        job.clock.put_forward(FENCE_S)
        with pytest.raises(GivenUp, match=why):
            await asyncio.wait_for(job.task, WAIT_S)
        assert job.events(object)[lines:] == [], "no culprit is named, and no decision is made"
        assert (job.backend.requeued, job.backend.replaced) == ([], [])

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_no_agent_is_lost_while_the_scheduler_ends_the_allocation(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        job.backend.own = CurrentRun(phase="ending", words="Slurm job 7 is COMPLETING")
        _, one = await job.start_both()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 3, "the scheduler to be asked again")
        assert job.events(AgentLost) == []
        job.backend.own = REQUEUED
        await until(lambda: job.leader.right_to_lead.outlived, "the answer of the scheduler")

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_after_a_network_cut_agents_have_time_to_reconnect(
    tmp_path: Path,
) -> None:
    """The cut affected agents too. An agent that does not reconnect is lost, and the culprit is
    unknown: its host or the host of the leader."""

    async def cut_off(job: LedJob, agent: FakeAgent) -> None:
        """Cut the leader off from the agent, and from the scheduler for two questions."""
        job.backend.mute, asked = True, job.backend.asked_own
        await agent.ws.close()
        await until(lambda: job.backend.asked_own >= asked + 2, "the scheduler to be asked again")
        job.backend.mute, asked = False, job.backend.asked_own
        await until(lambda: job.backend.asked_own > asked, "its answer")
        assert job.leader.background, "the leader waits for the agent"
        assert job.events(AgentLost) == []

    async def script(job: LedJob) -> None:
        _, one = await job.start_both()
        await cut_off(job, one)
        again = await job.agent("host-1")
        await until(lambda: not job.leader.background, "the end of that wait")
        assert job.events(AgentLost) == []
        await cut_off(job, again)
        job.clock.put_forward(SILENT_S + LISTEN_S)
        lost = await job.wait_for_event(AgentLost)
        assert lost.host == "host-1"
        assert lost.cut_off_s > 0

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_a_leader_that_is_cut_off_makes_no_decision(tmp_path: Path) -> None:
    """Its own ranks may fail because of the cut, and the leader cannot see the cause."""

    async def script(job: LedJob) -> None:
        job.backend.mute = True
        zero, one = await job.start_both()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 1, "the scheduler to be asked")
        await zero.send(exited(0, "host-0"))
        asked = job.backend.asked_own
        await until(lambda: job.backend.asked_own > asked + 2, "some time to pass")
        assert job.events(RankExited) == []
        job.backend.mute = False
        again = await job.agent("host-1")
        await job.wait_for_event(RankExited)
        for agent in (zero, again):
            await agent.expect(Stop)

    run_script(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("short_waits")
def test_an_ended_allocation_does_not_make_a_host_unavailable(
    tmp_path: Path,
) -> None:
    async def script(job: LedJob) -> None:
        job.backend.ended = Ended("this run of the job is over: Slurm job 7 is COMPLETING")
        await job.start_both()
        await job.leader.backend_calls.call(ReplaceAgent(host="host-1", reason="it was silent"))
        assert job.events(HostUnavailable) == []

    run_script(tmp_path, script, allocation=GRANTED)


def test_the_hosts_are_released_when_the_job_has_ended(tmp_path: Path) -> None:
    async def script(job: LedJob) -> None:
        zero, one = await job.start_both()
        for agent in (zero, one):
            await agent.send(stopped(agent.host, finished=True))
        for agent in (zero, one):
            await agent.expect(Leave)
            await agent.ws.close()
        await job.end()
        assert job.backend.released == 1

    run_script(tmp_path, script, allocation=GRANTED)


def test_a_defect_in_records_or_messages_holds_no_host_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def record(run: Run) -> None:
        raise KeyError("a defect")

    async def tell() -> None:
        raise KeyError("another defect")

    async def script(job: LedJob) -> None:
        job.leader.storage.record_speed = record  # type: ignore[method-assign]
        job.leader.before_release = tell
        zero, one = await job.start_both()
        for agent in (zero, one):
            await agent.send(stopped(agent.host, finished=True))
        for agent in (zero, one):
            await agent.expect(Leave)
            await agent.ws.close()
        await job.end()
        assert job.backend.released == 1

    run_script(tmp_path, script, allocation=GRANTED)
    # The threads of another test may still log.
    records = [record for record in caplog.records if record.name == "orchestrator.leader.leader"]
    failed = [record.message for record in records if record.levelname == "ERROR"]
    assert failed == [
        "failed to record the speed of the job",
        "failed to send the last messages",
    ]


def a_register(sent_at: float, host: str = "host-1", address: str = "10.0.0.1") -> Register:
    agent = AgentRegistered(host=host, address=address, devices=1, pid=1, incarnation="1")
    return Register(agent=agent, launch=LAUNCH, sent_at=sent_at)


def test_the_leader_finds_clock_skew_and_wrong_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"host-1": ("10.0.0.1",), "host-2": ("127.0.1.1",)}
    monkeypatch.setattr(
        "orchestrator.health.clocks_and_names.addresses_of", lambda name: names[name]
    )

    async def script(job: LedJob) -> None:
        calls: BackendCalls = job.leader.backend_calls
        assert await calls.look_at(a_register(time.time())) == ()
        skewed, named = await calls.look_at(a_register(time.time() - 60.0, "host-2"))
        assert (skewed.what, named.what) == ("clock", "name")
        assert "behind the leader" in skewed.found
        assert "127.0.1.1 on" in named.found

    run_script(tmp_path, script, allocation=GRANTED)


def test_a_low_limit_of_open_files_is_a_finding_of_the_leaders_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orchestrator.health.clocks_and_names.addresses_of", lambda _: ("10.0.0.1",)
    )

    async def script(job: LedJob) -> None:
        calls: BackendCalls = job.leader.backend_calls
        monkeypatch.setattr(resource, "getrlimit", lambda _: (OWN, OWN))
        (found,) = await calls.look_at(a_register(time.time(), calls.host))
        assert (found.what, found.verdict) == ("open files", "warns")
        assert await calls.look_at(a_register(time.time(), "host-2")) == ()
        monkeypatch.setattr(resource, "getrlimit", lambda _: (OWN, 2 * OWN))
        assert await calls.look_at(a_register(time.time(), calls.host)) == ()

    run_script(tmp_path, script, allocation=GRANTED)


def test_names_that_do_not_resolve_by_design_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lookup(name: str) -> tuple[str, ...]:
        raise AssertionError(f"{name} was looked up")

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", no_lookup)

    async def script(job: LedJob) -> None:
        calls: BackendCalls = job.leader.backend_calls
        assert await calls.look_at(a_register(time.time())) == ()
        (skewed,) = await calls.look_at(a_register(time.time() - 60.0))
        assert skewed.what == "clock"

    run_script(tmp_path, script, allocation=replace(GRANTED, names_resolve=False))


def test_slow_name_servers_delay_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def slow(name: str) -> tuple[str, ...]:
        over.wait(WAIT_S)
        return ()

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", slow)
    monkeypatch.setattr("orchestrator.leader.backend_calls.NAME_S", 0.05)

    async def script(job: LedJob) -> None:
        try:
            (named,) = await job.leader.backend_calls.look_at(a_register(time.time()))
        finally:
            over.set()
        assert (named.what, named.verdict) == ("name", "warns")
        assert "timed out" in named.found

    run_script(tmp_path, script, allocation=GRANTED)
