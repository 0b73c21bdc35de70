"""`python -m orchestrator` is `ndctl`."""

from orchestrator.cli import main

if __name__ == "__main__":  # the processes of `simulate` import this, too
    main()
