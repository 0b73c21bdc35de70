"""Stacks of many ranks are shortened, and the analysis finds the same as in complete stacks."""

import pytest

from orchestrator.agent.attempt import FEW_LINES
from orchestrator.agent.evidence.rank_evidence import STACK_LINES
from orchestrator.dashboard.describe import MAX_STACK_LINES
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from orchestrator.diagnosis.stacks.python_stacks import (
    main_stack,
    main_thread,
    of_the_program,
    shortened,
)

LOADER = ("read", "__next__", "batches", "train")
GLOO = ("wait", "all_reduce", "sync", "backward", "step", "train")


def thread(*functions: str, head: str = "Thread 0x00007f0000000001", file: str = "x") -> list[str]:
    frames = [f'  File "/job/{file}.py", line {n} in {name}' for n, name in enumerate(functions, 1)]
    return [f"{head} (most recent call first):", *frames]


def faulthandler_dump(at: tuple[str, ...], helpers: int = 4, deep: int = 0) -> list[str]:
    """A stack dump of faulthandler, which has the newest thread first and the main thread last."""
    names = ("_answer", "run", "_bootstrap_inner", "_bootstrap")
    flight = thread(*names, file="flight")
    pool = thread("get", "_worker", "run", "_bootstrap_inner", "_bootstrap", file="pool")
    main = (*at, *(f"layer_{n}" for n in range(deep)), "main", "<module>")
    current = thread(*main, head="Current thread 0x00007f0000000002", file="main")
    return [*flight, *(["", *pool] * helpers), "", *current]


def judged(most: int | None, *, deep: int = 0) -> Diagnosis:
    """The verdict on sixteen ranks without a dump, one of which is in its data loader."""
    facts = {}
    for rank in range(16):
        lines = faulthandler_dump(LOADER if rank == 5 else GLOO, deep=deep)
        stack = tuple(lines) if most is None else shortened(lines, most)
        facts[rank] = RankFacts(rank=rank, asked=True, stack=stack)
    return analyse(HangEvidence(facts=facts))


@pytest.mark.parametrize("most", [FEW_LINES, MAX_STACK_LINES, STACK_LINES])
@pytest.mark.parametrize("deep", [0, 80])
def test_the_rank_with_another_stack_is_found_in_shortened_stacks(most: int, deep: int) -> None:
    whole, cut = judged(None, deep=deep), judged(most, deep=deep)
    assert whole.ranks == (5,)
    assert (cut.kind, cut.ranks, cut.confidence) == (whole.kind, whole.ranks, whole.confidence)


@pytest.mark.parametrize("deep", [0, 5, 80])
@pytest.mark.parametrize("most", [8, FEW_LINES, 30, STACK_LINES])
def test_a_shortened_stack_keeps_the_place_of_the_main_thread(most: int, deep: int) -> None:
    lines = faulthandler_dump(GLOO, helpers=20, deep=deep)
    cut = shortened(lines, most)
    assert len(cut) <= most
    assert main_stack(cut)[: most - 2] == main_stack(lines)[: most - 2]
    assert main_stack(cut)[-1].function == "<module>"
    assert shortened(cut, most) == cut


def test_other_threads_fill_the_remaining_room_with_innermost_frames() -> None:
    deep = [f"frame_{n}" for n in range(30)]
    lines = [*thread(*deep, "_bootstrap", file="loader"), *faulthandler_dump(GLOO, helpers=0)]
    cut = shortened(lines, 30)
    assert cut[1] == '  File "/job/loader.py", line 1 in frame_0'
    assert cut[7].endswith("in _bootstrap")
    assert any("_answer" in line for line in cut)


def test_short_stacks_are_shown_unchanged() -> None:
    lines = faulthandler_dump(GLOO, helpers=0)
    assert shortened(lines, len(lines)) == tuple(lines)


@pytest.mark.parametrize("outermost", ["<module>", "_run_module_as_main", "started_by_c"])
def test_the_main_thread_runs_a_module_or_is_the_oldest(outermost: str) -> None:
    main = thread("wait", outermost, head="Current thread 0x1")
    assert main_thread([*thread("_answer", "_bootstrap"), "", *main]) == main


def test_frames_of_the_fork_server_are_not_part_of_a_stack() -> None:
    written = """\
Thread 0x00007f11 (most recent call first):
  File "/x/trainer/data/together.py", line 60 in _run
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f12 (most recent call first):
  File "/x/trainer/loop.py", line 79 in train
  File "/x/trainer/__main__.py", line 14 in <module>
  File "<frozen runpy>", line 226 in run_module
  File "/x/orchestrator/agent/keeper.py", line 63 in _train
  ...
Thread 0x00007f13 (most recent call first):
  File "/x/trainer/flight.py", line 37 in _answer
""".splitlines()
    outermost = f"{written[6]} (started by more than 2 frames of ndctl)"
    assert of_the_program(written) == [*written[:6], outermost, *written[10:]]
    assert main_stack(of_the_program(written)) == main_stack(written[4:7])
    spied = [
        "Thread 7 (active)",
        "    train (loop.py:79)",
        "    <module> (x/trainer/__main__.py:14)",
    ]
    assert of_the_program([*spied, "    run_module (<frozen runpy>:226)"]) == [
        *spied[:2],
        f"{spied[2]} (started by 1 frame of ndctl)",
    ]


@pytest.mark.parametrize(
    "launchers",
    [
        [
            '  File "<frozen runpy>", line 88 in _run_code',
            '  File "<frozen runpy>", line 291 in run_path',
            '  File "/x/trainer/program/run.py", line 124 in _run_python',
            '  File "/x/torch/distributed/elastic/multiprocessing/api.py", line 9 in _start',
        ],
        [
            "    _run_code (<frozen runpy>:88)",
            "    run_path (<frozen runpy>:291)",
            "    _run_python (trainer/program/run.py:124)",
            "    _start (torch/distributed/elastic/multiprocessing/api.py:9)",
        ],
    ],
)
def test_frames_that_started_an_own_program_are_cut(launchers: list[str]) -> None:
    own = ['  File "/x/train.py", line 9 in work', '  File "/x/train.py", line 12 in <module>']
    if launchers[0].startswith("    "):
        own = ["    work (train.py:9)", "    <module> (train.py:12)"]
    assert of_the_program(["Thread 7:", *own, *launchers]) == [
        "Thread 7:",
        own[0],
        f"{own[1]} (started by 4 frames of ndctl)",
    ]
    # A rank that still reads its program has no frame of it.
    assert of_the_program(launchers) == launchers


def test_frames_that_end_an_own_program_are_cut_too() -> None:
    """They are more than an event holds, and would push out the stacks of the other threads."""
    end = '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown'
    ndctl = ['  File "/x/trainer/program/run.py", line 156 in _end']
    ndctl += [f'  File "/x/torch/api.py", line {n} in start' for n in range(80)]
    other = thread("fetch", "run", "_bootstrap_inner")
    cut = of_the_program([*other, "", "Thread 0x00007f12 (most recent call first):", end, *ndctl])
    assert cut[-1] == f"{end} (started by 81 frames of ndctl)"
    assert shortened(cut, STACK_LINES) == tuple(cut)
