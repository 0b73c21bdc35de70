"""The real leader between a scheduler and agents that the test plays."""

import asyncio
import resource
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.fence import Fence, GivenUp, read_fence, write_fence
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
from orchestrator.leader.backend_calls import LISTEN_S, BackendCalls
from orchestrator.leader.leader import FENCE_S
from orchestrator.posix.fd_limit import OWN
from orchestrator.seams import CurrentRun, HostNotice
from tests.agent.world import LAUNCH, WAIT_S, a_plan, until
from tests.leader.leader_world import NAME, SILENT_S, FakeAgent, Led, exited, go, play, stopped

GRANTED = Allocation(id="7", restarts=0, hosts=("host-0", "host-1"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in vain here, or ends by itself, is waited for but a moment."""
    monkeypatch.setattr("orchestrator.job.hosts.scheduler_notices.NOTICES_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.backend_calls.REQUEUE_RETRY_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.backend_calls.CUT_OFF_POLL_S", 0.05)
    monkeypatch.setattr("orchestrator.leader.agent_sessions.RECONNECT_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_job_that_is_asked_to_leave_is_queued_again_before_its_agents_go(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.backend.cause, job.backend.busy = "preempted", 1
        zero, one = await job.started()
        job.leader.warned("SIGUSR2")
        for agent in (zero, one):
            assert (await agent.hear(Stop)).grace_s == 5.0
        await zero.say(stopped("host-0"))
        await one.say(stopped("host-1"))
        assert "preempted" in (await zero.hear(Leave)).reason
        assert len(job.backend.requeued) == 2, "asked again when there was no answer"
        for agent in (zero, one):
            await agent.ws.close()
        assert isinstance(await asyncio.wait_for(job.task, WAIT_S), Requeue)
        assert [event.cause for event in job.events(LeaveAsked)] == [None, "preempted"]
        assert "over" not in (job.run_dir.leader).read_text(), "the next start has agents too"

    play(tmp_path, script, allocation=GRANTED)


DISABLED = "Slurm refuses `scontrol requeue 1`: Requested operation is disabled"


@pytest.mark.usefixtures("impatient")
def test_a_scheduler_that_goes_on_refusing_the_job_gets_its_hosts_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stand idle to the time limit."""
    monkeypatch.setattr("orchestrator.leader.backend_calls.REFUSED_S", 5.0)

    async def script(job: Led) -> None:
        job.backend.refuses, job.backend.busy = BackendError(DISABLED), 1
        agents = await job.started()
        job.leader.warned("SIGUSR2")
        for agent in agents:
            await agent.hear(Stop)
            await agent.say(stopped(agent.host))
        await until(lambda: len(job.backend.requeued) >= 4, "it is asked again")
        assert job.events(RequeueRefused) == []
        job.clock.put_forward(5.0)
        for agent in agents:
            await agent.hear(Leave)
            await agent.ws.close()
        ending = await job.end()
        assert ending.state == "FAILED"
        assert DISABLED in ending.reason
        assert "resume with `ndctl submit SPEC --resume`" in ending.reason
        assert job.leader.supervisor.run.state == "FAILED"

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("cause", "state"), [("cancelled", "CANCELLED"), ("unknown", "FAILED")])
def test_a_job_that_the_scheduler_has_ended_is_asked_back_once(
    tmp_path: Path, cause: Cause, state: str
) -> None:
    async def script(job: Led) -> None:
        job.backend.refuses = Ended("Slurm job 7 has ended")
        zero, one = await job.started()
        job.backend.flagged = (HostNotice("host-1", "DRAINING", "bad fan"),)
        for agent in (zero, one):
            await agent.hear(Stop)
        job.backend.cause = cause
        for agent in (zero, one):
            await agent.say(stopped(agent.host))
        for agent in (zero, one):
            await agent.hear(Leave)
            await agent.ws.close()
        ending = await job.end()
        assert ending.state == state
        assert "Slurm job 7 has ended" in ending.reason
        assert len(job.backend.requeued) == 1

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_what_the_scheduler_holds_against_a_host_is_told_once(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        job.backend.flagged = (HostNotice("host-1", "DRAINING", "bad fan"),)
        for agent in (zero, one):
            assert (await agent.hear(Stop)).grace_s == 5.0
        await zero.say(stopped("host-0"))
        await one.say(stopped("host-1"))
        await zero.hear(Leave)
        assert job.backend.requeued == [("host-1",)]
        assert len(job.events(HostFlagged)) == 1

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_a_host_that_the_scheduler_opens_again_is_told_once(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        job.backend.flagged = (HostNotice("host-1", "cordoned", ""),)
        for agent in (zero, one):
            await agent.hear(Stop)
            await agent.say(stopped(agent.host))
        await until(lambda: job.backend.moved, "another host is asked for")
        job.backend.flagged = ()
        await job.happens(HostOpened)
        assert (await zero.hear(OfferPort)).attempt == 2
        asked = job.backend.asked
        await until(lambda: job.backend.asked > asked + 2, "it is asked again")
        told = [event.host for event in job.events(HostOpened)]
        assert (told, len(job.events(HostFlagged))) == (["host-1"], 1)

    play(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


def test_a_host_that_the_scheduler_took_is_nobodys_fault(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.backend.evicted = {"host-1": "Evicted"}
        zero, one = await job.started()
        await one.ws.close()
        await zero.hear(Stop)
        await zero.say(stopped("host-0"))
        lost = await job.happens(AgentLost)
        assert (lost.host, lost.taken) == ("host-1", "Evicted")
        assert job.leader.supervisor.run.history.incidents == ()

    play(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


def test_one_that_the_scheduler_took_and_replaced_at_once_is_nobodys_fault(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, _ = await job.started()
        job.backend.evicted = {"host-1": "Evicted"}
        await job.agent("host-1", pid=101)
        await zero.hear(Stop)
        await zero.say(stopped("host-0"))
        assert (await zero.hear(OfferPort)).attempt == 2
        came = [(event.host, event.taken) for event in job.events(AgentRegistered)]
        assert sorted(came[:2]) == [("host-0", ""), ("host-1", "")], (
            "in the order they were looked at"
        )
        assert came[2:] == [("host-1", "Evicted")]
        assert job.leader.supervisor.run.history.incidents == ()

    play(tmp_path, script, allocation=replace(GRANTED, successor_s=300.0))


@pytest.mark.usefixtures("impatient")
def test_a_host_where_no_agent_can_be_had_makes_the_job_smaller(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.backend.broken = True
        job.backend.smaller = JobPlan(plan=a_plan(1), number=2)
        zero, one = await job.started()
        await one.ws.close()
        await zero.hear(Stop)
        await zero.say(stopped("host-0"))
        await zero.hear(OfferPort)
        await zero.say(Port(attempt=2, port=20_002))
        start = await zero.hear(Start)
        assert (start.nodes, start.config) == (1, str(job.run_dir.trainer_config(2)))
        assert job.events(HostUnavailable)[0].host == "host-1"
        assert job.events(Replanned)[0].plan_number == 2
        assert job.backend.left == ("host-0",)

    play(tmp_path, script, shrink=True)


@pytest.mark.usefixtures("impatient")
def test_whatever_keeps_a_smaller_plan_from_being_made_is_told(tmp_path: Path) -> None:
    """Also what is no plan's fault: a profile that lay in a file which is gone."""

    def broken(*left: object) -> JobPlan:
        raise SpecError("no profile is called h100-of-ours")

    async def script(job: Led) -> None:
        job.backend.broken = True
        job.leader.backend_calls.replanner = broken
        zero, one = await job.started()
        await one.ws.close()
        await zero.hear(Stop)
        await zero.say(stopped("host-0"))
        refused = await job.happens(ReplanRefused)
        assert (refused.hosts, refused.why) == (1, "no profile is called h100-of-ours")

    play(tmp_path, script, shrink=True)


def test_hosts_try_each_other_and_the_judge_names_who_is_missing(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        agents = [await job.agent(f"host-{n}") for n in range(3)]
        orders = [await agent.hear(CheckFabric) for agent in agents]
        assert orders[0].rank == 0, "the leader's own host found the port"
        (hosts,) = {order.hosts for order in orders}
        assert sorted(hosts) == ["host-0", "host-1", "host-2"], "in the order in which they came"
        missing = ("host-1",)
        for agent in (agents[0], agents[2]):
            said = Checked(
                check=1, host=agent.host, state="waited", seconds=None, waited_for=missing
            )
            await agent.say(said)
        broken = Checked(check=1, host="host-1", state="broke", seconds=None, why="no route")
        await agents[1].say(broken)
        checked = await job.happens(HostsChecked)
        assert checked.unfit == {"host-1": "no route"}
        await go(agents[0], agents[2], 1)

    three = replace(GRANTED, hosts=("host-0", "host-1", "host-2"))
    play(tmp_path, script, allocation=three, preflight=True)


def test_a_leader_that_was_replaced_leaves_the_journal_alone(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        await job.started()
        fence = read_fence(job.run_dir.fence)
        assert fence == Fence(leader=NAME, attempt=1), "raised before the attempt began"
        before = job.run_dir.journal.read_bytes()
        write_fence(job.run_dir.fence, Fence(leader="another", attempt=1))
        with pytest.raises(GivenUp):
            await asyncio.wait_for(job.task, WAIT_S)
        assert job.run_dir.journal.read_bytes() == before

    play(tmp_path, script)


def is_in(words: str, log: pytest.LogCaptureFixture) -> bool:
    return words in log.text


def test_a_leader_that_cannot_read_the_fence_waits_with_what_it_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(job: Led) -> None:
        zero, _ = await job.started()
        fence = job.run_dir.fence
        fence.unlink()
        fence.mkdir()
        await zero.say(exited(0, "host-0"))
        await until(lambda: "failed to write the journal" in caplog.text, "what it would write")
        before = job.run_dir.journal.read_bytes()
        caplog.clear()
        for said in ("failed to write the journal", "failed to read the fence"):
            await until(partial(is_in, said, caplog), "another try, and another look")
        assert not job.task.done()
        assert job.events(RankExited) == []
        assert job.run_dir.journal.read_bytes() == before
        fence.rmdir()
        write_fence(fence, Fence(leader=NAME, attempt=1))
        await zero.hear(Stop)

    play(tmp_path, script)


def test_a_leader_that_was_replaced_does_not_take_the_fence_back(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        another = Fence(leader="another", attempt=7)
        write_fence(job.run_dir.fence, another)
        with pytest.raises(GivenUp):
            await job.leader._raise_fence(2)
        assert read_fence(job.run_dir.fence) == another

    play(tmp_path, script, allocation=GRANTED)


def test_the_leaders_own_agent_is_not_replaced(tmp_path: Path) -> None:
    """It runs in the leader's process, so ending it would end the leader."""

    async def script(job: Led) -> None:
        for host in ("host-0", "host-1"):
            await job.leader.backend_calls.call(ReplaceAgent(host=host, reason="it was silent"))
        assert job.backend.replaced == ["host-1"]

    play(tmp_path, script)


def test_an_agent_that_the_scheduler_may_not_end_is_told_to_leave_for_another_to_come(
    tmp_path: Path,
) -> None:
    """Of a pod whose name a Role cannot know, where no controller deletes it."""

    async def script(job: Led) -> None:
        job.backend.powerless = True
        one = await job.agent("host-1")
        await job.happens(AgentRegistered)
        away = ReplaceAgent(host="host-1", reason="host-1 failed its checks", elsewhere=True)
        await job.leader.backend_calls.call(away)
        told = await one.hear(Leave)
        assert (told.reason, told.again) == ("host-1 failed its checks", True)
        assert job.events(HostUnavailable) == []

    play(tmp_path, script)


def test_errands_do_not_end_with_the_scheduler_being_down(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        errands: BackendCalls = job.leader.backend_calls
        job.backend.broken = True
        await errands.ask_why("SIGTERM")
        assert (await job.happens(LeaveAsked)).cause == "unknown"

    play(tmp_path, script, allocation=GRANTED)


def test_a_run_that_broke_is_taken_back_at_once_before_ranks_have_left(tmp_path: Path) -> None:
    """Slurm is ending it, and may kill the leader before they have."""

    async def script(job: Led) -> None:
        job.backend.cause = "failed"
        job.backend.words = "Slurm job 7 is COMPLETING (JobLaunchFailure)"
        await job.started()
        job.leader.warned("SIGTERM")
        await until(lambda: len(job.events(LeaveAsked)) == 2, "the cause")
        assert job.events(LeaveAsked)[1].words == job.backend.words
        assert job.backend.requeued == [()]

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_a_leader_that_hears_nobody_blames_nobody(tmp_path: Path) -> None:
    """Cut off from agents and scheduler alike; what it hears afterwards was never lost."""

    async def script(job: Led) -> None:
        job.backend.mute = True
        zero, one = await job.started()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 2, "the scheduler to be asked again")
        assert job.events(AgentLost) == []
        again = await job.agent("host-1")
        job.backend.mute = False
        await until(lambda: not job.leader.background, "the errand's end")
        assert job.events(AgentLost) == []
        await again.ws.close()
        assert (await job.happens(AgentLost)).host == "host-1", "the scheduler is heard: it is lost"
        await zero.hear(Stop)

    play(tmp_path, script, allocation=GRANTED)


OVER = CurrentRun(phase="queued again", words="Slurm job 7 is PENDING (BeginTime)")
TAKEN = CurrentRun(
    phase="running",
    words="Slurm job 7 is RUNNING",
    given_up={"host-0": "Slurm removed it from the job"},
)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (OVER, "Slurm job 7 is PENDING"),
        (TAKEN, "host-0, the leader's own host, is not part of the run"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_leader_whose_own_host_was_taken_leaves_without_a_word(
    tmp_path: Path, own: CurrentRun, why: str
) -> None:
    """It hears no agent: others have queued the job again without it, or are about to."""

    async def script(job: Led) -> None:
        job.backend.own = own
        _, one = await job.started()
        lines = len(job.events(object))
        await one.ws.close()
        await until(lambda: job.leader.outlived, "what the scheduler says")
        job.clock.put_forward(FENCE_S)
        with pytest.raises(GivenUp, match=why):
            await asyncio.wait_for(job.task, WAIT_S)
        assert job.events(object)[lines:] == [], "no culprit is named, and nothing is decided"
        assert (job.backend.requeued, job.backend.replaced) == ([], [])

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_a_run_that_is_being_ended_is_waited_for_before_anybody_is_blamed(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        job.backend.own = CurrentRun(phase="ending", words="Slurm job 7 is COMPLETING")
        _, one = await job.started()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 3, "the scheduler to be asked again")
        assert job.events(AgentLost) == []
        job.backend.own = OVER
        await until(lambda: job.leader.outlived, "what the scheduler says")

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_once_the_scheduler_answers_agents_are_listened_to_before_any_is_lost(
    tmp_path: Path,
) -> None:
    """What cut the leader off cut them off as well; one that does not come back is lost, and which
    of the two hosts is to blame is not known."""

    async def cut_off(job: Led, agent: FakeAgent) -> None:
        """From the agent, and for two questions from the scheduler."""
        job.backend.mute, asked = True, job.backend.asked_own
        await agent.ws.close()
        await until(lambda: job.backend.asked_own >= asked + 2, "the scheduler to be asked again")
        job.backend.mute, asked = False, job.backend.asked_own
        await until(lambda: job.backend.asked_own > asked, "its answer")
        assert job.leader.background, "it is listened to"
        assert job.events(AgentLost) == []

    async def script(job: Led) -> None:
        _, one = await job.started()
        await cut_off(job, one)
        again = await job.agent("host-1")
        await until(lambda: not job.leader.background, "the end of that")
        assert job.events(AgentLost) == []
        await cut_off(job, again)
        job.clock.put_forward(SILENT_S + LISTEN_S)
        lost = await job.happens(AgentLost)
        assert lost.host == "host-1"
        assert lost.cut_off_s > 0

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_a_leader_that_is_cut_off_decides_nothing(tmp_path: Path) -> None:
    """Its own ranks may fail for that, and whose fault it is cannot be told from there."""

    async def script(job: Led) -> None:
        job.backend.mute = True
        zero, one = await job.started()
        await one.ws.close()
        await until(lambda: job.backend.asked_own >= 1, "the scheduler to be asked")
        await zero.say(exited(0, "host-0"))
        asked = job.backend.asked_own
        await until(lambda: job.backend.asked_own > asked + 2, "some time to pass")
        assert job.events(RankExited) == []
        job.backend.mute = False
        again = await job.agent("host-1")
        await job.happens(RankExited)
        for agent in (zero, again):
            await agent.hear(Stop)

    play(tmp_path, script, allocation=GRANTED)


@pytest.mark.usefixtures("impatient")
def test_a_run_that_has_ended_says_nothing_against_a_host_that_wants_an_agent(
    tmp_path: Path,
) -> None:
    async def script(job: Led) -> None:
        job.backend.ended = Ended("this run of the job is over: Slurm job 7 is COMPLETING")
        await job.started()
        await job.leader.backend_calls.call(ReplaceAgent(host="host-1", reason="it was silent"))
        assert job.events(HostUnavailable) == []

    play(tmp_path, script, allocation=GRANTED)


def test_the_hosts_are_given_back_when_the_job_has_ended(tmp_path: Path) -> None:
    async def script(job: Led) -> None:
        zero, one = await job.started()
        for agent in (zero, one):
            await agent.say(stopped(agent.host, finished=True))
        for agent in (zero, one):
            await agent.hear(Leave)
            await agent.ws.close()
        await job.end()
        assert job.backend.released == 1

    play(tmp_path, script, allocation=GRANTED)


def a_register(sent_at: float, host: str = "host-1", address: str = "10.0.0.1") -> Register:
    agent = AgentRegistered(host=host, address=address, devices=1, pid=1, incarnation="1")
    return Register(agent=agent, launch=LAUNCH, sent_at=sent_at)


def test_the_leader_sees_what_only_two_hosts_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"host-1": ("10.0.0.1",), "host-2": ("127.0.1.1",)}
    monkeypatch.setattr(
        "orchestrator.health.clocks_and_names.addresses_of", lambda name: names[name]
    )

    async def script(job: Led) -> None:
        errands: BackendCalls = job.leader.backend_calls
        assert await errands.look_at(a_register(time.time())) == ()
        skewed, named = await errands.look_at(a_register(time.time() - 60.0, "host-2"))
        assert (skewed.what, named.what) == ("clock", "name")
        assert "behind the leader" in skewed.found
        assert "127.0.1.1 on" in named.found

    play(tmp_path, script, allocation=GRANTED)


def test_a_leader_that_may_open_too_few_files_says_so_of_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orchestrator.health.clocks_and_names.addresses_of", lambda _: ("10.0.0.1",)
    )

    async def script(job: Led) -> None:
        errands: BackendCalls = job.leader.backend_calls
        monkeypatch.setattr(resource, "getrlimit", lambda _: (OWN, OWN))
        (found,) = await errands.look_at(a_register(time.time(), errands.host))
        assert (found.what, found.verdict) == ("open files", "warns")
        assert await errands.look_at(a_register(time.time(), "host-2")) == ()
        monkeypatch.setattr(resource, "getrlimit", lambda _: (OWN, 2 * OWN))
        assert await errands.look_at(a_register(time.time(), errands.host)) == ()

    play(tmp_path, script, allocation=GRANTED)


def test_names_that_only_the_scheduler_knows_are_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unasked(name: str) -> tuple[str, ...]:
        raise AssertionError(f"{name} was looked up")

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", unasked)

    async def script(job: Led) -> None:
        errands: BackendCalls = job.leader.backend_calls
        assert await errands.look_at(a_register(time.time())) == ()
        (skewed,) = await errands.look_at(a_register(time.time() - 60.0))
        assert skewed.what == "clock"

    play(tmp_path, script, allocation=replace(GRANTED, names_resolve=False))


def test_name_servers_that_do_not_answer_keep_no_host_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def slow(name: str) -> tuple[str, ...]:
        over.wait(WAIT_S)
        return ()

    monkeypatch.setattr("orchestrator.health.clocks_and_names.addresses_of", slow)
    monkeypatch.setattr("orchestrator.leader.backend_calls.NAME_S", 0.05)

    async def script(job: Led) -> None:
        try:
            (named,) = await job.leader.backend_calls.look_at(a_register(time.time()))
        finally:
            over.set()
        assert (named.what, named.verdict) == ("name", "warns")
        assert "timed out" in named.found

    play(tmp_path, script, allocation=GRANTED)
