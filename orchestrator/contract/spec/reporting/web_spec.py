"""The leader's own server for metrics and pages."""

import ipaddress
from typing import Annotated

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import AtLeast, AtMost, Matches
from orchestrator.contract.spec.reporting.secret_text import SecretRef


class WebSpec(Struct, frozen=True, kw_only=True):
    """Metrics for Prometheus, and pages, of this job alone, which change nothing. A new leader
    serves them on its own host."""

    port: Annotated[int, AtLeast(1), AtMost(65535)] = 9418
    """If it is not free, the job runs without the server, and the leader's log says so."""
    bind: Annotated[str, Matches(r"[0-9a-fA-F.:]+", "an IP address", "0.0.0.0")] = "127.0.0.1"
    """Address to listen at. Except on a loopback address the server uses TLS with the job's
    certificate, and `token` must be given."""
    token: SecretRef | None = None
    """`file:PATH` or `env:VARIABLE` on the leader's host. Clients send it as
    `Authorization: Bearer TOKEN`; a browser opens `https://HOST:PORT/?token=TOKEN` once."""

    def __post_init__(self) -> None:
        try:
            loopback = ipaddress.ip_address(self.bind).is_loopback
        except ValueError as exc:
            limit, fix = "an IP address", "for example 127.0.0.1, 0.0.0.0 or ::"
            raise Invalid([Problem(path="bind", value=self.bind, limit=limit, fix=fix)]) from exc
        if not loopback and self.token is None:
            limit = "given unless bind is a loopback address, because others reach the port"
            fix = "for example token: env:NDCTL_WEB_TOKEN"
            raise Invalid([Problem(path="token", limit=limit, fix=fix)])

    @property
    def is_private(self) -> bool:
        """Only users of the leader's host can connect."""
        return ipaddress.ip_address(self.bind).is_loopback
