"""Delivers one message to one receiver, once. Errors name neither URLs nor secrets."""

import asyncio
import json
import smtplib
import socket
import ssl
from collections.abc import Mapping
from email.message import EmailMessage
from email.utils import localtime
from hashlib import sha256

import aiohttp

from orchestrator.contract.spec.reporting.notify_spec import EmailSpec, NotifySpec
from orchestrator.notify.message import Message
from orchestrator.posix.run_with_timeout import within
from orchestrator.posix.secret_ref import NoSecret, secret_of

TRY_S = 15.0
"""Limit of one try."""
AGAIN = (408, 425, 429)
"""Refusals of an HTTP server that may pass, besides those from 500 on."""


class Undelivered(Exception):
    """The message was not delivered. `final`: the same would happen again."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


async def deliver(spec: NotifySpec, message: Message, environ: Mapping[str, str]) -> None:
    """Raises Undelivered."""
    try:
        async with asyncio.timeout(TRY_S):
            await _deliver(spec, message, environ)
    except TimeoutError as exc:
        raise Undelivered(f"no answer within {TRY_S:.0f} s") from exc
    except NoSecret as exc:
        raise Undelivered(str(exc)) from exc


async def _deliver(spec: NotifySpec, message: Message, environ: Mapping[str, str]) -> None:
    if spec.email is not None:
        await within(None, _mail, spec.email, message, environ)
    elif spec.command:
        await _run(spec.command, message)
    elif spec.slack is not None:
        url = await within(None, secret_of, spec.slack, environ)
        await _post(url, {"text": slack_text(message)}, message)
    elif spec.webhook is not None:
        url = spec.webhook
        if url.startswith(("file:", "env:")):
            url = await within(None, secret_of, url, environ)
        await _post(url, message.body, message)


def slack_text(message: Message) -> str:
    """Slack's mrkdwn, in which these three characters are the only special ones of text."""
    rows = "\n".join(f"• {label}: {text}" for label, text in message.rows)
    escaped = f"{message.title}\n{rows}"
    for char, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        escaped = escaped.replace(char, written)
    return escaped


async def _post(url: str, body: Mapping[str, object], message: Message) -> None:
    # Errors of aiohttp may contain the URL, which is a secret, so only their kind is told.
    headers = {"Idempotency-Key": message.id.encode("ascii", "backslashreplace").decode()}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers, allow_redirects=False) as said,
        ):
            status = said.status
    except aiohttp.InvalidURL as exc:
        raise Undelivered("the URL is not valid", final=True) from exc
    except aiohttp.ClientConnectorCertificateError as exc:
        raise Undelivered("the server's certificate is not valid") from exc
    except aiohttp.ClientConnectorError as exc:
        raise Undelivered(f"cannot connect: {exc.os_error.strerror or 'no route'}") from None
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        raise Undelivered(f"the connection broke: {type(exc).__name__}") from None
    if status >= 300:
        final = status < 500 and status not in AGAIN
        raise Undelivered(f"the server answered HTTP {status}", final=final)


async def _run(command: tuple[str, ...], message: Message) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as exc:
        raise Undelivered(f"{command[0]} cannot be run: {exc.strerror}", final=True) from exc
    try:
        await process.communicate(json.dumps(message.body).encode())
    finally:
        if process.returncode is None:  # it took too long
            process.kill()
            await process.wait()
    if process.returncode:
        raise Undelivered(f"{command[0]} exited with code {process.returncode}")


def _mail(spec: EmailSpec, message: Message, environ: Mapping[str, str]) -> None:
    mail = EmailMessage()
    host = socket.gethostname()
    mail["Subject"] = f"[ndctl] {message.title}"
    mail["From"] = spec.sender or f"ndctl@{host}"
    mail["To"] = ", ".join(spec.to)
    mail["Date"] = localtime()  # RFC 5322 requires it, and not every server adds it
    mail["Auto-Submitted"] = "auto-generated"  # so that no absent person's mailbox replies
    # Mail servers drop a message whose id they know, so the whole id counts, however long it is.
    mail["Message-ID"] = f"<{sha256(message.id.encode()).hexdigest()}@ndctl>"
    mail.set_content(f"{message.text}\n")
    context = ssl.create_default_context()
    try:
        with _connected(spec, context) as server:
            if spec.security == "starttls":
                server.starttls(context=context)
            if spec.user is not None and spec.password is not None:
                server.login(spec.user, secret_of(spec.password, environ))
            server.send_message(mail)
    except smtplib.SMTPAuthenticationError as exc:
        raise Undelivered("the mail server refused user and password") from exc
    except smtplib.SMTPRecipientsRefused as exc:
        raise Undelivered("the mail server refused all receivers", final=True) from exc
    except smtplib.SMTPResponseException as exc:
        final = exc.smtp_code >= 500
        raise Undelivered(f"the mail server answered {exc.smtp_code}", final=final) from exc
    except (smtplib.SMTPException, OSError) as exc:
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else type(exc).__name__
        raise Undelivered(f"the mail server cannot be used: {why}") from exc


def _connected(spec: EmailSpec, context: ssl.SSLContext) -> smtplib.SMTP:
    if spec.security == "tls":
        return smtplib.SMTP_SSL(spec.server, spec.port, timeout=TRY_S, context=context)
    return smtplib.SMTP(spec.server, spec.port, timeout=TRY_S)
