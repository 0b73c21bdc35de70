"""The ranks of one attempt on one host, with torchrun and keepers around them.

As `agent/attempt.py` sees them: a rank that dies takes its neighbours with it, told to stop they
checkpoint and leave at the end of a step, after the grace they are killed. Where the kernel cannot
kill them (a device or a mount that does not answer) they last until it can.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.contract.datagrams import RankEnded, Resumed, Saved, SaveFailed
from orchestrator.contract.events import RankError, RankEvidence
from orchestrator.contract.protocol import Exited, RankDigest, Start, StepTimes, Stopped
from orchestrator.simulation.training import Training

if TYPE_CHECKING:
    from orchestrator.simulation.agents import Agent

TORCHRUN_S = 0.3
"""From a rank's end to that of its neighbours and of torchrun."""
KILL_RETRY_S = 2.0
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:33158"


@dataclass(slots=True, eq=False)
class HostRanks:
    agent: "Agent"
    start: Start
    training: Training
    numbers: range
    begun_at: float
    hung: bool = False
    told: int | None = None
    """Steps done when the last digest was made; None before the first of the attempt."""
    stopping: bool = False
    ended: dict[int, RankEnded] = field(default_factory=dict)
    reports: list[Exited] = field(default_factory=list)
    """As told to the agent, which repeats them after a reconnection."""
    gone: bool = False

    @property
    def host(self) -> str:
        return self.agent.host.name

    @property
    def attempt(self) -> int:
        return self.start.attempt

    @property
    def alive(self) -> list[int]:
        return [number for number in self.numbers if number not in self.ended]

    # What happens to ranks

    def end_rank(
        self, number: int, code: int | None, by: signal.Signals | None = None, words: str = ""
    ) -> None:
        """One rank ends; a failure ends its neighbours too, and torchrun."""
        if self.gone or number in self.ended:
            return
        self._ended(number, code, by, words)
        if code != 0:
            self._after(TORCHRUN_S, partial(self._end_rest, signal.SIGTERM))
        elif not self.alive:
            self._after(TORCHRUN_S, self._gone)

    def end_all(self, exit_code: int) -> None:
        for number in self.alive:
            self._ended(number, exit_code, None, "")
        self._after(TORCHRUN_S, self._gone)

    def lose_peer(self) -> None:
        if self.alive and not self.hung:
            self.end_rank(self.alive[0], 1, words=CLOSED)

    def hang(self) -> None:
        self.hung = True

    def thaw(self) -> None:
        self.hung = self.agent.host.stuck

    def told_to_leave(self) -> None:
        """SIGTERM, from the agent or the scheduler."""
        self.training.asked = True

    def stop(self, grace_s: float) -> None:
        self.stopping = True
        self.told_to_leave()
        self._after(grace_s, self.kill)

    def kill(self) -> None:
        self.stopping = True
        self._end_rest(signal.SIGKILL)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.agent.world.timeline.after(seconds, happen)

    def _end_rest(self, by: signal.Signals) -> None:
        if self.gone:
            return
        if self.agent.host.stuck:
            self._after(KILL_RETRY_S, partial(self._end_rest, signal.SIGKILL))
            return
        for number in self.alive:
            self._ended(number, None, by, "")
        self._gone()

    def _ended(self, number: int, code: int | None, by: signal.Signals | None, words: str) -> None:
        end = RankEnded(attempt=self.attempt, rank=number, exit_code=code, signal=by)
        self.ended[number] = end
        if code == 0:
            return
        step, error = self.training.step, None
        if words:
            error = RankError(error="RuntimeError", message=words, step=step, traceback=words)
        exited = Exited(
            host=self.host,
            ended=end,
            age_s=0.0,
            step=step,
            stopped=self.stopping,
            error=error,
            log_tail=(words,) if words else (),
        )
        self.reports.append(exited)
        self.agent.report(exited)

    def vanish(self) -> None:
        """The host went off: nobody is told of any end."""
        if not self.gone:
            self.gone = True
            self.agent.host.ranks.remove(self)
            self.training.break_up(self)

    def _gone(self) -> None:
        if self.gone:
            return
        self.gone = True
        self.agent.host.ranks.remove(self)
        clean = all(end.exit_code == 0 for end in self.ended.values()) and not self.alive
        if not clean:
            self.training.break_up(self)
        why = "" if clean or self.stopping else "torchrun ended with code 1"
        stopped = Stopped(attempt=self.attempt, host=self.host, finished=clean, why=why)
        self.agent.attempt_ended(self, stopped)

    # What ranks say

    def tell(self, word: Resumed | Saved | SaveFailed) -> None:
        self.agent.tell(word)

    def first_step(self) -> None:
        self.agent.wake()

    def digest(self) -> tuple[RankDigest, ...]:
        now, training = self.agent.world.timeline.now, self.training
        still = now - max(training.moved, self.begun_at)
        steps = self._steps()
        return tuple(
            RankDigest(
                rank=number,
                pid=1,
                step=training.step,
                phase=training.phase,
                age_s=still,
                still_s=still,
                loss=1.0 if training.trained else None,
                tokens_per_second=None,
                memory_bytes=None,
                ended=number in self.ended,
                steps=steps,
            )
            for number in self.numbers
        )

    def _steps(self) -> StepTimes | None:
        """All as long as planned: what lies between two steps has a phase of its own."""
        training = self.training
        if not training.trained:
            return None
        new = training.step - (training.step if self.told is None else self.told)
        self.told = training.step
        length = training.work.step_s
        return StepTimes(count=new, total_s=new * length, longest_s=length) if new else None

    def evidence(self) -> tuple[RankEvidence, ...]:
        first = self.numbers[0]
        return tuple(
            RankEvidence(
                rank=number,
                pid=1,
                process_state="T" if self.hung and number == first else "S",
                step=self.training.step,
                phase=self.training.phase,
                age_s=0.0,
                stack=() if self.hung and number == first else ("wait (work.py:1)",),
            )
            for number in self.alive
        )
