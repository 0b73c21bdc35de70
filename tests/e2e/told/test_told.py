"""A drill in a real job, as people on call hear of it: webhook, mail, an alert of Prometheus, and
the report afterwards."""

import asyncio
import contextlib
import email
import email.policy
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.job import Ndctl, assert_nothing_left
from tests.e2e.test_recovery import SMALL
from tests.notify.receivers import Hook, MailServer
from tests.web.test_prometheus import LIMIT_S, PROMETHEUS, TOKEN, get, prometheus

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1200)]

DRILLS = ("--drill", "kill:rank=1@step=4", "--drill", "kill:rank=1@step=6")
"""The second kill ends the job, because one restart without a new checkpoint is allowed."""
FAILS = {"resilience__max_restarts": "1", "checkpoint__every_steps": "24"}
PAGES = "https://ndctl.example.org"
ON = "on: [incident, recovered, failed]"
"""Not `budget_low`: this job may fail before the notifier, which looks each second, looks again."""


@contextlib.contextmanager
def receivers() -> Iterator[tuple[Hook, MailServer, str, int]]:
    """A webhook, which fails at first, and a mail server, with the URL and the port."""
    hook, mails = Hook(codes=[503]), MailServer()
    listening, over = threading.Event(), asyncio.Event()
    found: list[tuple[str, int]] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with hook.serving() as url, mails.serving() as port:
            found.append((url, port))
            listening.set()
            await over.wait()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listening.wait(LIMIT_S)
        yield hook, mails, *found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(LIMIT_S)


def test_a_drill_is_told_by_webhook_and_mail_and_in_the_report(
    ndctl: Ndctl, tmp_path: Path
) -> None:
    with receivers() as (hook, mails, url, port):
        mail = f"email: {{to: [oncall@example.org], server: 127.0.0.1, port: {port}}}"
        notify = (
            f"[{{{ON}, webhook: {url!r}, page_url: {PAGES}}}, {{{ON}, {mail}, page_url: {PAGES}}}]"
        )
        done = ndctl.submit("--follow", *DRILLS, **SMALL, **FAILS, notify=notify)
        assert done.code == 1, done.out + done.err
        # The leader outlives the job by what it still has to tell.
        assert_nothing_left(ndctl.run_dir)
    told = ["incident", "recovered", "incident", "failed"]
    assert sorted(one["event"] for one in hook.got) == sorted(told)
    assert len(set(hook.ids)) == len(told), "each is delivered once"
    # A message that is tried again may come after the next one.
    first = next(
        one for one in hook.got if one["event"] == "incident" and one["page"].endswith("incident/1")
    )
    assert first["severity"] == "info"
    # The state is that of the moment when the message is written, up to a second later.
    assert first["state"] in ("RECOVERING", "RUNNING", "FAILED")
    assert first["title"] == "e2e: rank-killed: rank 1 was killed by SIGKILL (a drill)"
    assert first["who"] == "culprit rank 1 on host-1"
    did = "restart as attempt 2 from the beginning: no checkpoint yet"
    assert first["ndctl_did"].startswith(did)
    assert first["type"] == f"ndctl describe e2e --run-root {ndctl.run_root}"
    assert first["page"] == f"{PAGES}/job/e2e/incident/1"
    texts = [email.message_from_string(one, policy=email.policy.default) for one in mails.mails]
    titles = sorted(re.sub(r"\s+", " ", one["Subject"]) for one in texts)
    assert titles == sorted(f"[ndctl] {one['title']}" for one in hook.got)
    last = next(one for one in texts if "FAILED" in one["Subject"])
    assert "to resume: ndctl submit" in last.get_content()
    sent = ndctl.events("NoticeSent")
    assert len({(one["notice"], one["receiver"]) for one in sent if one["delivered"]}) == 8

    page = tmp_path / "report.html"
    done = ndctl("report", "e2e", "--html", str(page), "--price", "2.5")
    assert done.code == 0, done.err
    text = page.read_text()
    for words in ("rank 1 was killed by SIGKILL", "#2 rank-killed (drill)", "GPU-hours", "money"):
        assert words in text, words
    assert not re.search(r"<script|(?:src|href)=\"?http", text), "it is one file"
    if PROMETHEUS is not None:
        asyncio.run(_an_alert_fires(ndctl, tmp_path))


async def _an_alert_fires(ndctl: Ndctl, folder: Path) -> None:
    """Prometheus scrapes `ndctl serve` and evaluates the rules of manifests/monitoring."""
    token = folder / "token"
    token.write_text(TOKEN)
    serve = ndctl.start("serve", "--port", "0", "--token-file", str(token), str(ndctl.run_root))
    try:
        assert serve.stdout is not None
        port = int(re.findall(r":(\d+)/", await asyncio.to_thread(serve.stdout.readline))[0])
        async with aiohttp.ClientSession() as session, asyncio.timeout(2 * LIMIT_S):
            with prometheus(folder, port) as api:
                while not (firing := await _firing(session, api)):
                    await asyncio.sleep(0.2)
                assert firing == {("NdctlJobFailed", "e2e")}
    finally:
        serve.terminate()
        serve.communicate()


async def _firing(session: aiohttp.ClientSession, api: str) -> set[tuple[str, str]]:
    try:
        alerts = (await get(session, f"{api}/alerts"))["data"]["alerts"]
    except (aiohttp.ClientError, ValueError):  # it does not serve yet
        return set()
    return {
        (one["labels"]["alertname"], one["labels"].get("job_name", ""))
        for one in alerts
        if one["state"] == "firing"
    }
