"""Initial values do not depend on how tensors are sharded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.init_weights import TILE, draw_part
from trainer.model.regions import Region

ROWS, COLUMNS = 2 * TILE + 40, TILE + 90
WHOLE: Region = (slice(0, ROWS), slice(0, COLUMNS))


def drawn(region: Region, key: str = "0 weight") -> torch.Tensor:
    part = torch.empty([side.stop - side.start for side in region])
    draw_part(part, region, key, 0.5)
    return part


def sides(size: int) -> st.SearchStrategy[slice]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted)
    return ends.map(lambda pair: slice(*pair))


@settings(max_examples=30)
@given(sides(ROWS), sides(COLUMNS))
def test_a_shard_gets_the_same_initial_values_as_the_whole_tensor(
    rows: slice, columns: slice
) -> None:
    assert torch.equal(drawn((rows, columns)), drawn(WHOLE)[rows, columns])


def test_values_are_normal_and_differ_from_tile_to_tile_and_name_to_name() -> None:
    whole = drawn(WHOLE)
    assert whole.mean().item() == pytest.approx(0.0, abs=0.005)
    assert whole.std().item() == pytest.approx(0.5, rel=0.01)
    assert not torch.equal(whole[:TILE, :TILE], whole[TILE : 2 * TILE, :TILE])
    assert not torch.equal(whole, drawn(WHOLE, "0 other"))
    assert not torch.equal(whole, drawn(WHOLE, "1 weight"))
