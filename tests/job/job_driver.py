"""`Job` passes events to the real `step`, and keeps the state and the actions."""

from typing import Any

from orchestrator.contract.check_results import Finding
from orchestrator.contract.drills import Drill, parse_drill
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.actions import Action
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    CheckpointSaved,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    HostStopped,
    JobSubmitted,
    LeaderStarted,
    RankError,
    RankEvidence,
    RankExited,
    StepReached,
    Tick,
    TrainingResumed,
)
from orchestrator.contract.plan import Memory, Plan
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from tests.read_events import as_read

START = 1_700_000_000.0
GLOO_CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by"
    " peer [127.0.0.1]:33158. This is typically caused by a remote worker crashing. Check the logs"
    " of the remote worker before reporting an error. GLHF! 🏖️"
)
"""The message of a real gloo rank whose peer was killed."""


def host(number: int) -> str:
    return f"host-{number}"


def plan(hosts: int = 2, each: int = 2) -> Plan:
    return Plan(
        mesh=Mesh(dp_shard=hosts, tp=each),
        micro_batch_size=1,
        gradient_accumulation=1,
        hosts=tuple(host(n) for n in range(hosts)),
        ranks_per_host=each,
        memory=Memory(peak_bytes=1, items={}),
    )


def submitted(hosts: int = 2, each: int = 2, spares: int = 0, **more: Any) -> JobSubmitted:
    launch = LaunchPlan(
        job="quickstart",
        run_dir="/runs/quickstart",
        launch=1,
        hosts=tuple(host(n) for n in range(hosts + spares)),
        devices_per_host=each,
        agent_timeout=10.0,
    )
    values: dict[str, Any] = {
        "at": START,
        "backend": "local",
        "steps": 60,
        "plan": plan(hosts, each),
        "plan_number": 1,
        "launch": launch,
        "max_restarts": 3,
        "hang_timeout": None,
        "init_timeout": 600.0,
        "stop_grace": 30.0,
    }
    return JobSubmitted(**values | more)


def drills(*texts: str) -> tuple[Drill, ...]:
    return tuple(parse_drill(text, number) for number, text in enumerate(texts, 1))


def exited(rank: int, attempt: int = 1, *, at: float = START + 50, **more: Any) -> RankExited:
    """An exit by SIGKILL, unless `more` says otherwise."""
    values: dict[str, Any] = {
        "at": at,
        "attempt": attempt,
        "rank": rank,
        "host": host(rank // 2),
        "exit_code": None,
        "signal": None if {"exit_code", "error"} & set(more) else 9,
        "step": 0,
        "stopped": False,
        "detected_after_s": 0.0,
        "error": None,
        "log_tail": (),
    }
    return as_read(RankExited(**values | more))


def error(message: str, kind: str = "RuntimeError", at_step: int = 10) -> RankError:
    text = f'Traceback (most recent call last):\n  File "x.py"\n{kind}: {message}'
    return RankError(error=kind, message=message, step=at_step, traceback=text)


def raised(rank: int, message: str, attempt: int = 1, **more: Any) -> RankExited:
    known = {key: more.pop(key) for key in ("kind", "at_step") if key in more}
    return exited(rank, attempt, exit_code=1, error=error(message, **known), **more)


def found(rank: int, **more: Any) -> RankEvidence:
    values: dict[str, Any] = {
        "rank": rank,
        "pid": 100 + rank,
        "process_state": "S",
        "step": 10,
        "phase": "train",
        "age_s": 12.0,
        "stack": ("all_reduce",),
    }
    return RankEvidence(**values | more)


class Job:
    """One job. Each helper passes an event one second after the last, and returns the actions."""

    def __init__(self, hosts: int = 2, each: int = 2, spares: int = 0, **more: Any) -> None:
        self.run, self.at = Run(), START
        self.allocation: Allocation | None = None
        self.exclude: dict[str, str] = {}
        self.always: tuple[str, ...] = ()
        self.cleared: dict[str, float] = {}
        self.all: list[tuple[Event, tuple[Action, ...]]] = []
        self.hosts = tuple(host(n) for n in range(hosts))
        self.all_hosts = tuple(host(n) for n in range(hosts + spares))
        self.each = each
        self.tell(submitted(hosts, each, spares, **more))

    def tell(self, event: Event) -> tuple[Action, ...]:
        event = as_read(event, self.run.job.failure_classes if self.run.job else ())
        self.run, actions = step(self.run, event)
        self.all.append((event, actions))
        return actions

    def granted(self, restarts: int = 0, successor_s: float | None = None) -> "Job":
        """Give the job an allocation of a scheduler, with all its hosts."""
        self.allocation = Allocation(
            id="7", restarts=restarts, hosts=self.all_hosts, successor_s=successor_s
        )
        return self

    def now(self) -> float:
        self.at += 1
        return self.at

    def leads(self, taken: str = "", boot: str = "") -> tuple[Action, ...]:
        """A leader starts, in the allocation if there is one."""
        started = LeaderStarted(
            at=self.now(),
            host="host-0",
            pid=99,
            allocation=self.allocation,
            exclude=self.exclude,
            always=self.always,
            cleared=self.cleared,
            taken=taken,
            boot=boot,
        )
        return self.tell(started)

    def registers(
        self,
        name: str,
        pid: int = 1,
        devices: int | None = None,
        findings: tuple[Finding, ...] = (),
        running: int = 0,
        taken: str = "",
        boot: str = "",
        former_stopped: bool = False,
    ) -> tuple[Action, ...]:
        devices = self.each if devices is None else devices
        return self.tell(
            AgentRegistered(
                at=self.now(),
                host=name,
                address="::1",
                devices=devices,
                pid=pid,
                incarnation=str(pid),
                findings=findings,
                running=running,
                taken=taken,
                boot=boot,
                former_stopped=former_stopped,
            )
        )

    def starts(self) -> "Job":
        self.leads()
        for name in self.all_hosts:
            self.registers(name)
        return self

    def trains(self, first: int = 0) -> tuple[Action, ...]:
        """The present attempt resumes from step `first` and does one step."""
        attempt = self.run.attempt.number
        self.tell(TrainingResumed(at=self.now(), attempt=attempt, step=first))
        return self.steps(first + 1)

    def steps(self, number: int) -> tuple[Action, ...]:
        attempt = self.run.attempt.number
        event = StepReached(
            at=self.now(), attempt=attempt, step=number, loss=1.0, tokens_per_second=9.0
        )
        return self.tell(event)

    def running(self) -> "Job":
        self.starts().trains()
        return self

    def saves(self, number: int) -> tuple[Action, ...]:
        return self.tell(
            CheckpointSaved(at=self.now(), attempt=self.run.attempt.number, step=number)
        )

    def drill(self, number: int) -> tuple[Action, ...]:
        attempt = self.run.attempt.number
        event = DrillHappened(at=self.now(), attempt=attempt, drill=number, rank=1, step=5)
        return self.tell(event)

    def exits(self, rank: int, **more: Any) -> tuple[Action, ...]:
        return self.tell(exited(rank, self.run.attempt.number, at=self.now(), **more))

    def raises(self, rank: int, message: str, **more: Any) -> tuple[Action, ...]:
        return self.tell(raised(rank, message, self.run.attempt.number, at=self.now(), **more))

    def stops(
        self,
        *names: str,
        finished: bool = False,
        why: str = "",
        killed: tuple[int, ...] = (),
    ) -> tuple[Action, ...]:
        """All ranks have ended on `names`, or on every host of the attempt if none is given."""
        actions: tuple[Action, ...] = ()
        for name in names or self.run.attempt.placement:
            attempt = self.run.attempt.number
            event = HostStopped(
                at=self.now(),
                attempt=attempt,
                host=name,
                finished=finished,
                why=why,
                killed=killed,
            )
            actions = self.tell(event)
        return actions

    def loses(
        self, name: str, silent_s: float = 2.0, taken: str = "", *, closed: bool = False
    ) -> tuple[Action, ...]:
        why = "it said nothing"
        lost = AgentLost(
            at=self.now(), host=name, why=why, silent_s=silent_s, taken=taken, closed=closed
        )
        return self.tell(lost)

    def hangs(self, behind: tuple[int, ...] = ()) -> tuple[Action, ...]:
        event = HangDetected(
            at=self.now(),
            attempt=self.run.attempt.number,
            phase="train",
            step=10,
            stalled_s=0.5,
            limit_s=0.4,
            behind=behind,
        )
        return self.tell(event)

    def moves_again(self, rank: int = 2) -> tuple[Action, ...]:
        attempt = self.run.attempt.number
        return self.tell(
            HangOver(at=self.now(), attempt=attempt, rank=rank, step=11, phase="train")
        )

    def judged(self, rank: int | None, **more: Any) -> tuple[Action, ...]:
        """The leader's analysis of a hang names `rank`, or no culprit."""
        host = () if rank is None else (f"host-{rank // 2}",)
        values: dict[str, Any] = {
            "verdict": "not-known" if rank is None else "never-entered",
            "cause": "no rank stands out" if rank is None else f"rank {rank} did not call it",
            "scope": None if rank is None else "rank",
            "ranks": () if rank is None else (rank,),
            "hosts": host,
            "confidence": 0.0 if rank is None else 0.95,
        }
        return self.tell(
            HangJudged(at=self.now(), attempt=self.run.attempt.number, **values | more)
        )

    def shows(self, name: str, *ranks: RankEvidence) -> tuple[Action, ...]:
        attempt = self.run.attempt.number
        return self.tell(EvidenceGathered(at=self.now(), attempt=attempt, host=name, ranks=ranks))

    def cancelled(self, by: str = "ann") -> tuple[Action, ...]:
        return self.tell(CancelRequested(at=self.now(), by=by))

    def waits(self, seconds: float) -> tuple[Action, ...]:
        self.at += seconds
        return self.tell(Tick(at=self.at))

    def fails_once(self, rank: int = 1, **more: Any) -> tuple[Action, ...]:
        """A rank is killed, and the ranks of every host stop."""
        self.exits(rank, **more)
        return self.stops()
