"""`torchrun -m trainer CONFIG`, or `python -m trainer CONFIG` for one rank alone."""

import os
import sys

from orchestrator.contract.env import RankEnv
from trainer.process import start

if __name__ == "__main__":
    # The flight recorder keeps the last collectives of every rank for whoever looks into a hang;
    # torch reads this when it is imported.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # noqa: TID251 (this is the entry point)
    code = start(sys.argv[1:], RankEnv.from_mapping(os.environ))  # noqa: TID251
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A rank that failed must be gone at once: the interpreter's own way out would wait for
        # threads that wait for other ranks.
        os._exit(code)
