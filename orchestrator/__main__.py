"""`python -m orchestrator` is `ndctl`."""

from orchestrator.cli import main

main()
