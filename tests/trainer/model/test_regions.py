from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from trainer.model.regions import overlap, within


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` of torch.chunk."""
    each = -(-size // parts)
    return min(size, index * each), min(size, (index + 1) * each)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.data())
def test_regions_of_fsdp_and_tensor_parallel_shards_equal_those_of_torch(
    rows_per_rank: int, shards: int, tp: int, data: st.DataObject
) -> None:
    """Also for sizes that do not divide evenly. `local_region` relies on this."""
    shard, rank = data.draw(st.integers(0, shards - 1)), data.draw(st.integers(0, tp - 1))
    size = rows_per_rank * tp
    (length,), (offset,) = _compute_local_shape_and_global_offset(
        (size,), (shards, tp), [shard, rank], [_StridedShard(0, split_factor=tp), Shard(0)]
    )
    begin, end = chunk(size, tp, rank)
    first, last = chunk(end - begin, shards, shard)
    assert length == last - first
    assert offset == begin + first or not length


def test_the_overlap_of_boxes_is_computed() -> None:
    box = (slice(2, 6), slice(0, 4))
    assert overlap(box, (slice(4, 9), slice(1, 2))) == (slice(4, 6), slice(1, 2))
    assert overlap(box, (slice(6, 9), slice(0, 4))) is None
    assert within((slice(4, 6), slice(1, 2)), box) == (slice(2, 4), slice(1, 2))
