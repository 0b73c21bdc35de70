"""`python -m trainer.program WORKDIR PROGRAM …`, with the program as after `ndctl run --`:
`train.py ARGS`, `-m MODULE ARGS` or `--no-python EXECUTABLE ARGS`. With `--capture FOLDER COPY`
before it, the rank runs the copy of the user's folder.
"""

import os
import sys

from orchestrator.contract.files.env import RUN_DIR, RankEnv
from trainer.program.captured import split
from trainer.program.run import run
from trainer.rank.environment import torch_defaults

if __name__ == "__main__":
    env = RankEnv.from_mapping(os.environ)  # noqa: TID251 (this is the entry point)
    for name, value in torch_defaults(env).items():
        os.environ.setdefault(name, value)  # noqa: TID251
    run_dir = os.environ.get(RUN_DIR, ".")  # noqa: TID251
    captured, words = split(sys.argv[1], sys.argv[2:])
    if captured is not None:
        captured.move_search_path(os.environ)  # noqa: TID251
    run(sys.argv[1], run_dir, words, env, captured)
