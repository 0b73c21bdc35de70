"""Secrets that a spec names but does not contain: in a file or in an environment variable."""

from typing import Annotated

from orchestrator.contract.spec.limits import Matches

SecretRef = Annotated[
    str,
    Matches(
        r"(file:[^\0\n]+|env:[A-Za-z_][A-Za-z0-9_]*)",
        "file:PATH or env:VARIABLE, because spec and journal keep no secrets",
        "file:/etc/ndctl/token",
    ),
]
"""Read by the leader where it runs, when the secret is needed."""
