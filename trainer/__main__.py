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
        # A rank that failed must be gone at once: the interpreter's own way out would wait for
        # threads that wait for other ranks.
        os._exit(code)
