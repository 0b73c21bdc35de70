"""The memory model of the planner, compared with the allocations of the trainer on fake ranks.

The tests use a few layers of Llama 3 8B. `python -m benchmarks.memory` has all cells completely.
"""

from dataclasses import replace

import pytest

from benchmarks.memory.cells import CELLS, Cell, compare

FEW = [
    "8b, 8 ranks",
    "8b, 8 ranks, full",
    "8b, 8 ranks, selective",
    "8b, 8 ranks, elementwise",
    "8b, 8 ranks, 2048 tokens",
    "8b, 8 ranks, float32",
    "8b, 64 ranks",
    "8b, 64 ranks, tp 8",
    "8b, 64 ranks, tp 8, full",
    "8b, 64 ranks, tp 8, selective",
    "8b, 64 ranks, tp 8, elementwise",
    "8b, 8 ranks, tp 8",
    "8b, 8 ranks, 6 layers, ddp",
    "8b, 8 ranks, 6 layers, ddp, 8192 tokens, selective",
    "8b, 8 ranks, 6 layers, zero1",
    "8b, 8 ranks, 6 layers, zero1, 4 micro batches",
    "8b, 8 ranks, 6 layers, zero1, reduced in bfloat16",
    "8b, 8 ranks, 6 layers, ddp, bfloat16 moments",
    "8b, 8 ranks, cp 2, ulysses",
]
PIPELINES = [
    "8b, 8 ranks, pp 2, gpipe",
    "8b, 8 ranks, pp 2, interleaved_1f1b",
    "8b, 8 ranks, pp 2, zbv",
]


# With tensor parallel, an embedding in a separate unit returns a view, and torch warns. That is the
# same in real runs, and harmless because layers of transformers do not add to it in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


def check(cell: Cell) -> None:
    found = compare(cell)
    assert found.has_exact_states, (found.states, found.traced)
    assert abs(found.error) < 0.05, (found.planned, found.traced)


@pytest.mark.parametrize("name", FEW)
def test_states_are_exact_and_the_peak_is_close(name: str) -> None:
    cell = CELLS[name]
    check(replace(cell, changed={**cell.changed, "num_hidden_layers": 3}))


@pytest.mark.parametrize("name", PIPELINES)
def test_states_are_exact_and_the_peak_is_close_with_each_schedule(name: str) -> None:
    cell = CELLS[name]
    check(replace(cell, changed={**cell.changed, "num_hidden_layers": 5}, passes=4))


def test_document_masks_add_only_positions_and_rotary_angles() -> None:
    whole = Cell(parallel={"dp_shard": 8}, changed={"num_hidden_layers": 3}, tokens=2048, micro=2)
    found = compare(replace(whole, masked=True))
    assert found.has_exact_states
    assert abs(found.error) < 0.002, (found.planned, found.traced)
    tokens, angles = 2 * 2048, 2 * 128 * 2
    # Starts and positions take 8 bytes each. Without masks both sequences share the angles.
    more = tokens * (8 + 8) + tokens // 2 * angles
    assert found.traced.peak == compare(whole).traced.peak + more


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_states_are_exact_and_the_peak_is_close_for_the_whole_model(name: str) -> None:
    check(CELLS[name])
