"""`ndctl.should_stop`: the same answer on all ranks in the same call."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from ndctl.rank.agreement import Ranks
from ndctl.rank.stopping import StopVote, should_stop
from tests.ndctl.rank.many_ranks import World


@pytest.mark.parametrize("signalled", [{0}, {2}, {0, 1, 2}])
def test_all_ranks_stop_in_the_same_call_whoever_gets_the_signal(signalled: set[int]) -> None:
    votes = [StopVote() for _ in range(3)]
    done = [0] * 3

    def train(ranks: Ranks) -> int:
        pace = random.Random(ranks.rank)
        while not votes[ranks.rank].ask(ranks):
            done[ranks.rank] += 1
            time.sleep(pace.uniform(0, 0.004))
            if done[ranks.rank] == 40 and ranks.rank in signalled:
                votes[ranks.rank].signalled = True
        # Once true, it stays true, without any other rank.
        assert votes[ranks.rank].ask(ranks)
        return done[ranks.rank]

    steps = World(3).together(train)
    assert len(set(steps)) == 1, steps
    # A rank may be ahead of rank 0 by the calls of one second at most.
    assert 40 <= steps[0] < 40 + 2 / 0.001


def test_ranks_agree_once_for_many_short_steps() -> None:
    votes = [StopVote() for _ in range(2)]

    def train(ranks: Ranks) -> int:
        for _ in range(1000):
            votes[ranks.rank].ask(ranks)
        return votes[ranks.rank].window

    decisions = World(2).together(train)
    assert decisions[0] == decisions[1]
    # The number of calls that a decision is for doubles up to 64, so it is 20 on an idle machine.
    assert decisions[0] < 100


def test_the_first_call_must_be_in_the_main_thread() -> None:
    said: list[str] = []

    def call() -> None:
        try:
            should_stop()
        except RuntimeError as exc:
            said.append(str(exc))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "must be in the main thread" in said[0]


SCRIPT = """
import signal, sys, time
import ndctl
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
print(ndctl.should_stop(), flush=True)
while not ndctl.should_stop():
    time.sleep(0.01)
print("stopped", flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_script_without_ndctl_stops_on_the_signal_and_keeps_its_own_handler(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert said == ("mine\nstopped\n" if number == signal.SIGTERM else "stopped\n")
    assert process.returncode == 0
