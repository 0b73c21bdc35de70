"""The rank that uses the most memory."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainer.measure.fullest import RANK_BITS, Fullest


def test_ranks_compare_after_2_4_8_steps_of_an_attempt_and_after_the_last_step() -> None:
    fullest = Fullest(torch.device("cpu"), done=100, last=121)
    assert [step for step in range(101, 122) if fullest.is_due(step)] == [102, 104, 108, 116, 121]
    assert Fullest(torch.device("cpu"), done=0, last=1).is_due(1)


def test_one_maximum_finds_the_bytes_and_the_rank() -> None:
    terabyte, rank = 1 << 40, (1 << RANK_BITS) - 1
    assert (terabyte << RANK_BITS | rank) < torch.iinfo(torch.int64).max
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        fullest = Fullest(torch.device("cpu"), done=0, last=9)
        fullest.compare()
    finally:
        dist.destroy_process_group()
    assert fullest.rank == 0
    assert fullest.memory_bytes is not None
    assert fullest.memory_bytes > 50 << 20
