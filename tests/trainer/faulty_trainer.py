"""`python -m trainer`, with faults that a test orders by environment variables.

TEST_TRAIN_TIMEOUT_S   the process groups' timeout in training
TEST_LATE_S            seconds that rank 1 comes late
TEST_LATE_AGAIN_S      seconds that rank 0 comes late when torchrun starts it again
TEST_FIRST_DRILLS      drills of the first start alone, of those that torchrun counts
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
    os._exit(code)
