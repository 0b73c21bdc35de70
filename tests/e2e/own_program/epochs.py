"""A stranger's script: each epoch starts and ends spawned loader workers, which takes longer than
many steps."""

# ruff: noqa: T201 (a script that a user runs)
import multiprocessing.util
import time

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
STEPS = 20
PAUSE_S = 2.0


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8)


def begin_and_end_slowly(worker: int) -> None:
    """Called in each worker as it starts."""
    time.sleep(PAUSE_S)
    multiprocessing.util.Finalize(None, time.sleep, args=(PAUSE_S,), exitpriority=1)


def main() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = DataLoader(
        Ones(), num_workers=1, multiprocessing_context="spawn", worker_init_fn=begin_and_end_slowly
    )
    for epoch in range(1, EPOCHS + 1):
        for batch in batches:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
        print(f"epoch {epoch}", flush=True)


if __name__ == "__main__":
    main()
