"""Who is told of what: messages to Slack, a webhook, by mail or through a command."""

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.limits import AtLeast, AtMost, Matches
from orchestrator.contract.spec.reporting.secret_text import SecretRef
from orchestrator.contract.spec.types import Seconds

Occasion = Literal[
    "incident", "recovered", "failed", "succeeded", "cancelled", "stalled", "budget_low"
]
"""When a message is sent: `NotifySpec.on`."""
Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")

Address = Annotated[str, Matches(r"[^@\s,<>]+@[^@\s,<>]+", "a mail address", "oncall@example.org")]
Word = Annotated[str, Matches(r"[^\0]+", "a word, not empty", "notify.sh")]


class EmailSpec(Struct, frozen=True, kw_only=True):
    """Addresses, and the SMTP server that takes the mail."""

    to: tuple[Address, ...]
    """Addresses that get the mail."""
    server: Annotated[str, Matches(r"[A-Za-z0-9.:\[\]-]+", "a host name", "mail.example.org")] = (
        "localhost"
    )
    """Host name of the SMTP server, as the leader's host reaches it."""
    port: Annotated[int, AtLeast(1), AtMost(65535)] = 25
    """Port of the SMTP server: usually 25, 587 with `starttls`, 465 with `tls`."""
    security: Literal["none", "starttls", "tls"] = "none"
    """`starttls` and `tls` check the certificate of the server."""
    user: str | None = None
    """User name at the server. null: without a login."""
    password: SecretRef | None = None
    """`file:PATH` or `env:VARIABLE`, on the leader's host."""
    sender: Address | None = None
    """null: `ndctl@` and the leader's host."""

    def __post_init__(self) -> None:
        problems = []
        if not self.to:
            problems.append(Problem(path="to", limit="one address or more", fix="add an address"))
        if (self.user is None) != (self.password is None):
            limit = "given together with the other of user and password"
            problems.append(Problem(path="user", limit=limit, fix="give both or none"))
        elif self.password is not None and self.security == "none":
            limit = "starttls or tls with a password, which would travel unencrypted"
            problems.append(Problem(path="security", limit=limit, fix="set security to starttls"))
        if problems:
            raise Invalid(problems)


class NotifySpec(Struct, frozen=True, kw_only=True):
    """One receiver. Give exactly one of `slack`, `webhook`, `email` and `command`."""

    on: tuple[Occasion, ...] = ("incident", "failed", "succeeded", "stalled", "budget_low")
    """Occasions. `incident`: ranks are stopped. `recovered`: the first step after it; of a program
    without steps, all its ranks run again. `failed`, `succeeded`, `cancelled`: the end. `stalled`:
    no step for `stalled_after`. `budget_low`: the next incident before a checkpoint ends the
    job."""
    slack: SecretRef | None = None
    """URL of an incoming webhook of Slack, a secret: `file:PATH` or `env:VARIABLE`."""
    webhook: Word | None = None
    """URL that gets a POST with JSON; `file:PATH` or `env:VARIABLE` if it contains a secret."""
    email: EmailSpec | None = None
    """Addresses and mail server."""
    command: tuple[Word, ...] = ()
    """Program and arguments, run on the leader's host with the same JSON at its standard input."""
    min_severity: Severity = "info"
    """Drills, recovery, success and cancellation are `info`; incidents and stalls `warning`; the
    end of all restarts, and failure, `critical`."""
    quiet_for: Seconds | None = None
    """Seconds after a message in which no other one of the same kind is sent. The end of a job is
    always sent. null: each is sent."""
    stalled_after: Seconds = 1800.0
    """Seconds without a step, under the present leader, after which `stalled` is sent, once for
    each attempt. Not of a program that runs and reports no steps."""

    page_url: Word | None = None
    """Where this receiver reaches `ndctl serve`, or the leader's server, without a token, such as
    `https://ndctl.example.org`. Messages then link to the page of the incident or of the job."""

    def __post_init__(self) -> None:
        if problems := [*self._problems(), *self._page_problems()]:
            raise Invalid(problems)

    def _page_problems(self) -> Iterator[Problem]:
        if self.page_url is None:
            return
        try:
            url = urlsplit(self.page_url)
            plain = not (url.query or url.fragment or url.username or url.password)
            fits = url.scheme in ("http", "https") and bool(url.hostname) and plain
        except ValueError:
            fits = False
        if not fits:
            limit = "an http or https URL without a query and a password"
            fix = "for example https://ndctl.example.org"
            yield Problem(path="page_url", limit=limit, fix=fix)

    def _problems(self) -> Iterator[Problem]:
        given = [self.slack, self.webhook, self.email, self.command]
        if sum(one not in (None, ()) for one in given) != 1:
            limit = "exactly one of slack, webhook, email and command"
            yield Problem(path="", limit=limit, fix="for example slack: env:SLACK_URL")
        if self.webhook is None or self.webhook.startswith(("file:", "env:")):
            return
        url = urlsplit(self.webhook)
        if url.scheme not in ("http", "https") or not url.hostname:
            fix = "for example https://example.org/hook"
            yield Problem(path="webhook", limit="an http or https URL, or file: or env:", fix=fix)
        elif url.query or url.username or url.password:
            limit = "file:PATH or env:VARIABLE if it has a query or a password: it is a secret"
            yield Problem(path="webhook", limit=limit, fix="put the URL into a file")

    @property
    def kind(self) -> str:
        """How it is delivered, in one word."""
        if self.slack is not None:
            return "slack"
        if self.webhook is not None:
            return "webhook"
        return "email" if self.email is not None else "command"
