"""The sample ledger, and the check that finds the first mistake in one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.skipped_batches import Window, batch_of
from trainer.data import ledger_check
from trainer.data.__main__ import describe
from trainer.data.ledger import SampleLedger, Start, Sums, expected_hashes, sums_of
from trainer.data.ledger_check import Mistake, first_mistake, replay
from trainer.data.order import sample_at

SIZE, SAMPLES, SEED = 6, 50, 11
Values = dict[str, Any]


def start(**changes: Any) -> Start:
    values = {"seed": SEED, "num_samples": SAMPLES, "global_batch_size": SIZE, "data": "d"}
    return Start(**{"attempt": 1, **values, **changes})


def read(step: int, ranks: int = 1, seed: int = SEED, skipped: tuple[Window, ...] = ()) -> Sums:
    """The sums of the samples of `step`, added up over `ranks` ranks in float64 as ranks do."""
    total, batch = np.zeros(3), batch_of(step, skipped)
    for rank in range(ranks):
        positions = np.arange((batch - 1) * SIZE + rank, batch * SIZE, ranks, dtype=np.uint64)
        samples = [sample_at(int(p), SAMPLES, seed) for p in positions]
        total += sums_of(positions, np.array(samples, dtype=np.uint64))
    return Sums(*total.tolist())


def write(
    path: Path, attempt: int, steps: range, ranks: int = 1, skipped: tuple[Window, ...] = ()
) -> None:
    ledger = SampleLedger(path, start(attempt=attempt, skipped=skipped))
    for step in steps:
        ledger.append((step, read(step, ranks, skipped=skipped)))
    ledger.sync()


def check(path: Path, saved: int = 0) -> Mistake | None:
    standing = replay(path.read_text().splitlines())
    assert standing is not None
    return first_mistake(standing, saved)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Steps 1-5 on one rank; then, as after crashes, from step 4 on two ranks and from 8 on
    three."""
    path = tmp_path / "samples.jsonl"
    write(path, 1, range(1, 6))
    write(path, 2, range(4, 8), ranks=2)
    write(path, 3, range(8, 11), ranks=3)
    return path


def test_a_run_with_restarts_on_other_meshes_passes_the_check(ledger: Path) -> None:
    standing = replay(ledger.read_text().splitlines())
    assert standing is not None
    assert (standing.steps, standing.starts) == (10, 3)
    assert check(ledger) is None
    assert check(ledger, saved=10) is None


@given(st.integers(1, 2**30), st.integers(1, 5))
def test_the_sum_does_not_depend_on_the_number_of_ranks(step: int, ranks: int) -> None:
    assert read(step, ranks).hash == expected_hashes(start(), step, 1)[0]


def test_sums_of_many_ranks_are_exact() -> None:
    largest = Sums(1.0, float(2**32 - 1), float(2**32 - 1))
    total = np.zeros(3)
    for _ in range(1 << 15):
        total += largest
    # 2**15 * -1, modulo 2**32.
    assert Sums(*total.tolist()).hash == f"{2**32 - 2**15:08x}" * 2


def change(path: Path, number: int, edit: Callable[[Values], Values | None]) -> None:
    """Edit line `number`, counted from 0. An `edit` that returns None removes the line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edited = [edit(line) if n == number else line for n, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in edited if line is not None))


def another_hash(line: Values) -> Values:
    return {**line, "hash": f"{int(line['hash'], 16) ^ 1:016x}"}


# Lines of the fixture: 0 start, 1-5 steps 1-5, 6 start, 7-10 steps 4-7, 11 start, 12-14 steps 8-10.
@pytest.mark.parametrize(
    ("number", "edit", "step", "what"),
    [
        (2, another_hash, 2, "it read wrong samples in attempt 1: their hash is"),
        (8, another_hash, 5, "it read wrong samples in attempt 2"),
        (9, lambda line: None, 6, "the ledger has no line for it"),
        (9, lambda line: {**line, "samples": 5}, 6, "it read 5 samples in attempt 2; expected 6"),
        (9, lambda line: {**line, "first": 7}, 6, "it started at position 7 of the stream"),
        (9, lambda line: {**line, "step": 5}, 5, "it ran 2 times in attempt 2"),
        (6, lambda line: {**line, "seed": 1}, 4, "attempt 2 resumed with a different seed"),
        (11, lambda line: {**line, "data": "e"}, 8, "attempt 3 resumed with a different data"),
        (11, lambda line: {**line, "done": 5}, 6, "the ledger has no line for it"),
        (6, lambda line: None, 4, "it ran 2 times in attempt 1"),
    ],
)
def test_a_changed_ledger_is_detected(
    ledger: Path, number: int, edit: Callable[[Values], Values | None], step: int, what: str
) -> None:
    change(ledger, number, edit)
    mistake = check(ledger)
    assert mistake is not None
    assert mistake.step == step
    assert mistake.what.startswith(what)


@pytest.mark.parametrize("number", [4, 5])
def test_lines_of_repeated_steps_do_not_count(ledger: Path, number: int) -> None:
    change(ledger, number, another_hash)
    assert check(ledger) is None


def test_samples_of_another_seed_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SampleLedger(path, start())
    file.append((1, read(1)))
    file.append((2, read(2, seed=SEED + 1)))
    mistake = check(path)
    assert mistake is not None
    assert mistake.step == 2


def test_a_line_cut_off_by_a_crash_counts_only_if_its_step_does(ledger: Path) -> None:
    with ledger.open("a") as file:
        file.write('{"attempt":3,"step":11,"fir')
    assert check(ledger) is None
    assert check(ledger, saved=11) == Mistake(11, "the ledger has no line for it")
    write(ledger, 4, range(11, 13))
    assert check(ledger) is None
    write(ledger, 5, range(14, 15))
    assert check(ledger) == Mistake(13, "the ledger has no line for it")


def test_a_ledger_without_steps_is_not_accepted(tmp_path: Path) -> None:
    assert replay(["", "no json", "[1]", '{"step": 1}']) is None
    standing = replay([json.dumps({**Values(attempt=1), **VALUES})])
    assert standing is not None
    assert first_mistake(standing) == Mistake(1, "the ledger has no line for any step")


VALUES: Values = {"seed": 0, "num_samples": 1, "global_batch_size": 1, "data": ""}


def test_long_ledgers_are_checked_in_parts(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_check, "CHECKED_AT_ONCE", 3 * SIZE)
    assert check(ledger) is None
    change(ledger, 14, another_hash)
    mistake = check(ledger)
    assert mistake is not None
    assert mistake.step == 10


WINDOW = (Window(first=7, last=10),)
BOTH = (*WINDOW, Window(first=13, last=14))


@pytest.fixture
def rolled_back(ledger: Path) -> Path:
    """`ledger` after two rollbacks: steps 7-10 diverged, so the run resumed from the checkpoint of
    step 6 and skipped their batches. It did the same again from step 9 on."""
    write(ledger, 4, range(7, 10), skipped=WINDOW)
    write(ledger, 5, range(9, 13), skipped=BOTH)
    return ledger


def test_skipped_windows_pass_the_check_and_are_named(rolled_back: Path) -> None:
    standing = replay(rolled_back.read_text().splitlines())
    assert standing is not None
    assert first_mistake(standing, saved=12) is None
    assert standing.skipped == BOTH
    read_in_all = [batch_of(step, BOTH) for step in range(1, 13)]
    assert read_in_all == [1, 2, 3, 4, 5, 6, 11, 12, 15, 16, 17, 18]
    told = describe(standing)
    assert "each of the 12 valid steps (from 5 starts) read exactly" in told
    assert told.endswith(
        "no sample was lost or read twice; skipped on purpose: batches 7 to 10 of the stream"
        " (positions 36 to 59), batches 13 to 14 of the stream (positions 72 to 83), 36 samples"
    )


def test_a_future_window_is_not_reported_as_skipped(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, 1, range(1, 6), skipped=WINDOW)
    standing = replay(path.read_text().splitlines())
    assert standing is not None
    assert (check(path), standing.skipped) == (None, ())
    assert "skipped" not in describe(standing)


# Lines after the fixture's 15: 15 start, 16-18 steps 7-9, 19 start, 20-23 steps 9-12.
@pytest.mark.parametrize(
    ("number", "edit", "step", "what"),
    [
        (19, lambda line: {**line, "skipped": []}, 7, "it started at position 60 of the stream"),
        (19, lambda line: {**line, "skipped": line["skipped"][1:]}, 7, "it started at position 60"),
        (21, lambda line: {**line, "first": 54}, 10, "it started at position 54 of the stream"),
        (21, another_hash, 10, "it read wrong samples in attempt 5"),
        (16, lambda line: None, 7, "the ledger has no line for it"),
    ],
)
def test_an_unordered_skip_is_detected(
    rolled_back: Path, number: int, edit: Callable[[Values], Values | None], step: int, what: str
) -> None:
    change(rolled_back, number, edit)
    mistake = check(rolled_back)
    assert mistake is not None
    assert mistake.step == step
    assert mistake.what.startswith(what)
