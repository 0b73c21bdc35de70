"""The ranks of one attempt on one host, with their torchrun and rank watchers.

They behave as `agent/attempt.py` sees them. If a rank dies, torchrun ends the other ranks of the
host. Ranks that are told to stop save a checkpoint at the end of the step and exit; after the grace
period they are killed. If the kernel cannot kill them (a hung device or mount), they stay until it
can.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from orchestrator.agent.evidence.evidence_collector import as_read
from orchestrator.contract.files import exit_codes
from orchestrator.contract.memory.peers import CopyPlan
from orchestrator.contract.messages.agent_protocol import Evidence, RankDigest, Start, StepTimes
from orchestrator.contract.messages.events import (
    EvidenceGathered,
    HostStopped,
    RankError,
    RankEvidence,
    RankExited,
)
from orchestrator.simulation.world.flight_recorder import dump_of
from orchestrator.simulation.world.host_memory import HostMemory
from orchestrator.simulation.world.training import Training, TrainingNews
from orchestrator.simulation.world.training_faults import RankFailure

if TYPE_CHECKING:
    from orchestrator.simulation.processes.agent_process import AgentProcess

TORCHRUN_S = 0.3
"""Seconds from the exit of a rank to the exit of torchrun and its other ranks."""
KILL_RETRY_S = 2.0
HangKind = Literal["stopped", "busy", "loading"]
"""How a rank hangs: stopped by SIGSTOP, in a loop that holds the GIL, in its data loader."""
LOOP = 'File "/opt/trainer/loop.py", line 120 in step'
WAITS = ('File "/opt/torch/distributed/distributed_c10d.py", line 2877 in all_reduce', LOOP)
STACKS: dict[HangKind, tuple[str, ...]] = {
    "stopped": (),
    "busy": ('File "/opt/trainer/work.py", line 7 in spin', LOOP),
    "loading": ('File "/opt/trainer/loader.py", line 52 in next_batch', LOOP),
}
TOKENS = 1000.0
"""Tokens per second of the whole job."""
OWN_FRACTION = 0.2
"""Fraction of a step before the first collective."""
LOST_PEER = RankFailure(
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:33158",
    "RuntimeError",
    failure_class="gloo-connection",
    symptom=True,
)


@dataclass(slots=True, eq=False)
class HostRanks:
    agent: "AgentProcess"
    start: Start
    training: Training
    numbers: range
    begun_at: float
    hung: bool = False
    hang_kind: HangKind = "stopped"
    """How its first rank hangs."""
    digest_step: int | None = None
    """Steps done when the last digest was made; None before the first of the attempt."""
    stopping: bool = False
    ended: dict[int, RankExited] = field(default_factory=dict)
    reports: list[RankExited] = field(default_factory=list)
    """Reports to the agent, which repeats them after a reconnection."""
    have_exited: bool = False

    @property
    def host(self) -> str:
        return self.agent.host.name

    @property
    def memory(self) -> HostMemory:
        return self.agent.memory

    @property
    def copies(self) -> CopyPlan:
        return self.start.copies or CopyPlan()

    @property
    def attempt(self) -> int:
        return self.start.attempt

    @property
    def alive(self) -> list[int]:
        return [number for number in self.numbers if number not in self.ended]

    # Faults and orders that end or stop ranks

    def end_rank(self, number: int, failure: RankFailure) -> None:
        """End one rank. A failure also ends torchrun and the other ranks of the host."""
        if self.have_exited or number in self.ended:
            return
        self.agent.world.laws.rank_exited(self, number, failure)
        self._ended(number, failure)
        if failure.code != 0:
            self._after(TORCHRUN_S, partial(self._end_rest, signal.SIGTERM))
        elif self.alive:
            self.training.host_exited(self)  # the other ranks wait for it, torchrun for them
        else:
            self._after(TORCHRUN_S, self._all_exited)

    def fail_one(self, failure: RankFailure) -> None:
        if self.alive:
            self.end_rank(self.alive[0], failure)

    @property
    def slow_s(self) -> float:
        return self.agent.host.slow_s

    def end_all(self, exit_code: int) -> None:
        asked_to_exit = exit_code == exit_codes.CHECKPOINTED
        failure = RankFailure(
            code=exit_code, failure_class="scheduler-sigterm" if asked_to_exit else "unknown"
        )
        for number in self.alive:
            self.agent.world.laws.rank_exited(self, number, failure)
            self._ended(number, failure)
        self._after(TORCHRUN_S, self._all_exited)

    def lose_peer(self) -> None:
        if self.alive and not self.hung:
            self.end_rank(self.alive[0], LOST_PEER)

    def hang(self, how: HangKind = "stopped") -> None:
        self.hung, self.hang_kind, self.agent.host.ever_hung = True, how, True
        self.agent.world.laws.rank_hung(self, self.numbers[0])

    def resume_hung(self) -> None:
        self.hung = self.agent.host.unkillable

    def request_exit(self, *, in_memory: bool = False) -> None:
        """SIGTERM, from the agent or the scheduler, or the agent's `STOP_IN_MEMORY`."""
        self.training.exit_requested = True
        self.training.exit_on_disk |= not in_memory

    def stop(self, grace_s: float, *, in_memory: bool = False) -> None:
        self.stopping = True
        self.request_exit(in_memory=in_memory)
        self._after(grace_s, self.kill)

    def kill(self) -> None:
        self.stopping = True
        self._end_rest(signal.SIGKILL)

    def _after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.agent.world.timeline.after(seconds, callback)

    def _end_rest(self, by: signal.Signals) -> None:
        if self.have_exited:
            return
        if self.agent.host.unkillable:
            self._after(KILL_RETRY_S, partial(self._end_rest, signal.SIGKILL))
            return
        for number in self.alive:
            self._ended(number, RankFailure(code=None, signal=by))
        self._all_exited()

    def _ended(self, number: int, failure: RankFailure) -> None:
        step, error = self.training.step, None
        end = RankExited(
            attempt=self.attempt,
            rank=number,
            exit_code=failure.code,
            signal=failure.signal,
            step=step,
        )
        self.ended[number] = end
        if self._is_done(end):
            return
        if failure.error:
            error = RankError(
                error=failure.error,
                message=failure.message,
                step=step,
                traceback=failure.line,
                since=failure.first_bad_step,
            )
        exited = replace(
            end,
            host=self.host,
            stopped=self.stopping,
            error=error,
            phase=self.training.phase,
        )
        exited = as_read(exited, (failure.line,) if failure.line else (), self.start.classes)
        self.reports.append(exited)
        self.agent.report_exit(exited)

    def _is_done(self, end: RankExited) -> bool:
        return end.exit_code == 0 and end.step >= self.start.steps

    def power_lost(self) -> None:
        """The host lost power: the agent gets no report."""
        if not self.have_exited:
            self.have_exited = True
            self.agent.host.ranks.remove(self)
            self.training.host_exited(self)

    def _all_exited(self) -> None:
        if self.have_exited:
            return
        self.have_exited = True
        self.agent.host.ranks.remove(self)
        clean = all(map(self._is_done, self.ended.values())) and not self.alive
        if not clean:
            self.training.host_exited(self)
        why = "" if clean or self.stopping else "torchrun ended with code 1"
        stopped = HostStopped(attempt=self.attempt, host=self.host, finished=clean, why=why)
        self.agent.attempt_ended(self, stopped)

    # What ranks report

    def report_news(self, news: TrainingNews) -> None:
        self.agent.report_news(news)

    def first_step(self) -> None:
        self.agent.wake()

    def digest(self) -> tuple[RankDigest, ...]:
        now, training = self.agent.world.timeline.now, self.training
        still = now - max(training.progress_at, self.begun_at)
        steps = self._steps()
        return tuple(
            RankDigest(
                rank=number,
                pid=1,
                step=training.step,
                phase=training.phase,
                age_s=still,
                still_s=still,
                loss=1.0 if training.has_stepped else None,
                tokens_per_second=TOKENS if training.has_stepped else None,
                ended=number in self.ended,
                steps=steps,
            )
            for number in self.numbers
        )

    def _steps(self) -> StepTimes | None:
        """Times of the steps since the last digest, all of the same length. Time between steps
        belongs to another phase."""
        training = self.training
        if not training.has_stepped:
            return None
        new = training.step - (training.step if self.digest_step is None else self.digest_step)
        self.digest_step = training.step
        if not new:
            return None
        step_length_s = training.step_length_s
        own = OWN_FRACTION * training.work.step_s + self.slow_s
        return StepTimes(
            count=new, total_s=new * step_length_s, longest_s=step_length_s, own_s=new * own
        )

    def evidence(self) -> Evidence:
        """Evidence as `agent/evidence/rank_evidence.py` finds it. A rank that is stopped or holds
        the GIL writes no dump; a stopped rank has no stack either."""
        first, world = self.numbers[0], self.start.nodes * self.start.ranks_per_host
        mute = self.hung and self.hang_kind != "loading"
        dumps = {
            str(number): dump_of(number, world, self.training.step, behind=self._is_hung(number))
            for number in self.alive
            if not (mute and number == first)
        }
        busy = self.hung and self.hang_kind == "busy" and first in self.alive
        event = EvidenceGathered(
            attempt=self.attempt,
            host=self.host,
            ranks=tuple(self._rank_evidence(number) for number in self.alive),
            dumps=len(dumps),
            withheld=(first,) if busy else (),
        )
        return Evidence(event=event, dumps=dumps)

    def _is_hung(self, number: int) -> bool:
        return self.hung and number == self.numbers[0]

    def _rank_evidence(self, number: int) -> RankEvidence:
        stack = STACKS[self.hang_kind] if self._is_hung(number) else WAITS
        return RankEvidence(
            rank=number,
            pid=1,
            process_state="T" if self._is_hung(number) and self.hang_kind == "stopped" else "S",
            step=self.training.step,
            phase=self.training.phase,
            age_s=0.0,
            stack=stack,
        )
