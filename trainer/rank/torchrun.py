"""torchrun with a rendezvous store that listens only at the address of the first host.

python -m trainer.rank.torchrun --rdzv-backend=ndctl --rdzv-endpoint=ADDRESS:PORT
    --rdzv-conf=rank=N …
"""

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import (
    StaticTCPRendezvous,
    create_rdzv_handler,
)
from torch.distributed.run import main

from trainer.rank.stores import serve

BACKEND = "ndctl"


class Rendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous with our own store server."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            self._store = serve(
                self.master_addr, self.master_port, self.timeout, self.world_size, shared=True
            )
        return super().next_rendezvous()


def create(params: RendezvousParameters) -> RendezvousHandler:
    made = create_rdzv_handler(params)
    assert isinstance(made, StaticTCPRendezvous)
    return Rendezvous(
        master_addr=made.master_addr,
        master_port=made.master_port,
        rank=int(made.rank),  # from the command line, where it is text
        world_size=made.world_size,
        run_id=made.run_id,
        timeout=int(made.timeout.total_seconds()),
    )


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, create)
    main()
