"""transformers_trainer.py, whose rank 3 is killed while it saves step 10, in the first attempt.

The other ranks have written their files by then, so transformers' own `get_last_checkpoint` would
give this checkpoint, which lacks the random state of rank 3.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer

import ndctl

SCRIPT = Path(__file__).parents[3] / "examples" / "scripts" / "transformers_trainer.py"
proper = Trainer._save_rng_state


def save(self: Any, folder: str) -> None:
    if ndctl.attempt == 1 and self.state.global_step == 10 and self.args.process_index == 3:
        others = [Path(folder) / f"rng_state_{rank}.pth" for rank in range(3)]
        while not all(path.exists() for path in others):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    proper(self, folder)


Trainer._save_rng_state = save  # type: ignore[method-assign, assignment]
sys.path.insert(0, str(SCRIPT.parent))
runpy.run_path(str(SCRIPT), run_name="__main__")
