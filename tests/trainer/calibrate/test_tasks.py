"""What `ndctl calibrate` runs on a rank, here with one rank alone."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainer.calibrate.collectives import CALLS, collective, collective_tasks
from trainer.calibrate.compute import ON_CPU, compute_tasks
from trainer.calibrate.repeat import MOST, TOGETHER, Task, agree, everyones, measure

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_task_runs_and_the_important_ones_come_first() -> None:
    first, rest = compute_tasks(CPU)
    whats = {task.what for task in first}
    assert whats == {
        "product",
        "attention forward",
        "attention backward",
        "copy",
        "activation",
        "small operations",
    }
    assert {task.kind for task in first if task.what == "product"} == {"float32"}
    for task in [*first, *rest]:
        # Longer ones differ in their sizes alone.
        short = task.size.get("tokens", 0) <= ON_CPU.lengths[0]
        if short and task.size.get("inner", 0) <= ON_CPU.products[0][2]:
            task.make()()


def test_a_task_is_repeated_for_its_share_of_the_time() -> None:
    calls: list[int] = []
    task = Task(what="nothing", make=lambda: lambda: calls.append(1), size={"bytes": 8}, ranks=3)
    found = measure(task, CPU, 30.0)
    assert (found.what, found.ranks, found.size) == ("nothing", 3, {"bytes": 8})
    assert found.repeats == MOST
    assert 0 < found.low <= found.seconds <= found.high
    assert len(calls) > MOST, "with a warm-up"
    assert measure(task, CPU, 0.0).repeats == TOGETHER


def test_one_rank_on_one_host_has_no_link_to_measure() -> None:
    assert not [*collective_tasks(CPU, ranks_per_host=1)]


@pytest.mark.parametrize("call", CALLS)
def test_each_collective_runs(call: str) -> None:
    collective(call, CPU, 1 << 12, None, 1)()


def test_ranks_agree_on_the_largest_value_and_pool_all_times() -> None:
    assert agree(2.5) == 2.5
    assert everyones([3.0, 1.0, 2.0]) == [1.0, 2.0, 3.0]
