"""`python -m orchestrator` is `ndctl`."""

import sys
from pathlib import Path

if __name__ == "__main__":  # the worker processes of `simulate` also import this module
    if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
        # `-m` puts the working directory first, so that a user's `yaml.py` would be imported. If
        # the user has a folder `orchestrator`, Python has run that one; `ndctl` and `-P -m` avoid
        # this.
        del sys.path[0]
    try:
        from orchestrator.run_module import OF_COMMANDS, load_packages

        load_packages(OF_COMMANDS)  # wherever PYTHONPATH leads
        from orchestrator.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
