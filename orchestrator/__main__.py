"""`python -m orchestrator` is `ndctl`."""

import sys
from pathlib import Path

if __name__ == "__main__":  # the processes of `simulate` import this, too
    if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
        # `-m` has put the working directory first, where a user's `yaml.py` would be ours. A folder
        # `orchestrator` there has been run by now instead of this; `ndctl` and `-P -m` avoid that.
        del sys.path[0]
    from orchestrator.cli import main

    main()
