"""`python -m trainer` with faults. A test selects them by environment variables.

TEST_TRAIN_TIMEOUT_S   timeout of the process groups during training
TEST_LATE_S            seconds by which rank 1 starts late
TEST_LATE_AGAIN_S      seconds by which rank 0 starts late when torchrun restarts it
TEST_FIRST_DRILLS      drills of torchrun's first start only, not of its restarts
"""

import os
import sys
import time
from datetime import timedelta

from orchestrator.contract.files.env import RankEnv
from trainer import loop
from trainer.process import start

if __name__ == "__main__":
    if seconds := os.environ.get("TEST_TRAIN_TIMEOUT_S"):
        vars(loop)["train_timeout"] = lambda _: timedelta(seconds=float(seconds))
    if os.environ["RANK"] == "1":
        time.sleep(float(os.environ.get("TEST_LATE_S", "0")))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.environ.setdefault("NDCTL_DRILLS", os.environ.get("TEST_FIRST_DRILLS", "[]"))
    elif os.environ["RANK"] == "0":
        time.sleep(float(os.environ.get("TEST_LATE_AGAIN_S", "0")))
    code = start(sys.argv[1:], RankEnv.from_mapping(os.environ))
    sys.stderr.flush()
    if code:  # as in trainer/__main__.py; a forked rank that succeeds must return to torchrun
        os._exit(code)
