"""`torchrun -m trainer CONFIG`, or `python -m trainer CONFIG` for one rank alone."""

import os
import sys

from orchestrator.contract.files.env import RankEnv
from trainer.process import start
from trainer.rank.environment import torch_defaults

if __name__ == "__main__":
    env = RankEnv.from_mapping(os.environ)  # noqa: TID251 (this is the entry point)
    for name, value in torch_defaults(env).items():
        os.environ.setdefault(name, value)  # noqa: TID251
    code = start(sys.argv[1:], env)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A normal exit joins all threads, and those may wait for other ranks. A failed rank must
        # end at once, so that its agent can report it.
        os._exit(code)
