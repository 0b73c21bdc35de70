import asyncio
import email
import email.policy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages import wire
from orchestrator.contract.messages.events import (
    CancelRequested,
    CheckpointSaved,
    Event,
    HostStopped,
    NoticeSent,
    ProgramRuns,
    RankError,
    StepReached,
)
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.reporting.notify_spec import EmailSpec, NotifySpec, Occasion
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.event_text import describe_event
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.notify import deliver as delivering
from orchestrator.notify.deliver import Undelivered, deliver, slack_text
from orchestrator.notify.message import Message, message_of
from orchestrator.notify.notices import Notice, notices_of, wants
from orchestrator.notify.notifier import Notifier, notifying
from tests.dashboard.dashboard_story import (
    HOSTS,
    START,
    finished,
    killed,
    recovered,
    restarting,
    silent_program,
    started,
    submitted,
)
from tests.notify.receivers import Hook, MailServer, until

RUN_DIR = RunDir(Path("/runs/quickstart"))
ALL: tuple[Occasion, ...] = get_args(Occasion)


def stopped(at: float = START + 31, attempt: int = 1) -> list[Event]:
    """All ranks have ended, so that there is an incident."""
    return [
        HostStopped(at=at, attempt=attempt, host=host, finished=False)
        for host in ("host-0", "host-1")
    ]


def run_after(events: Sequence[Event]) -> Run:
    return fold(events, Run())


def notices(
    events: Sequence[Event], now: float = START + 90, led_since: float = START
) -> list[Notice]:
    return list(notices_of(run_after(events), now, 1800.0, led_since))


def message(events: Sequence[Event], number: int = 0) -> Message:
    run = run_after(events)
    return message_of(notices(events)[number], run, Commands(job="quickstart"), "/runs/quickstart")


def test_a_message_links_to_the_page() -> None:
    run = run_after(restarting())
    (notice,) = notices_of(run, START + 90, 1800.0, START)
    commands, url = Commands(job="quickstart"), "https://x.example/ndctl/"
    said = message_of(notice, run, commands, "/runs/quickstart", url)
    assert "page: https://x.example/ndctl/job/quickstart/incident/1" in said.text
    assert said.body["page"] == "https://x.example/ndctl/job/quickstart/incident/1"
    ended = notices_of(run_after(finished()), START + 90, 1800.0, START)
    (last,) = [one for one in ended if one.on == "succeeded"]
    said = message_of(last, run_after(finished()), commands, "/runs/a b", url)
    assert said.body["page"] == "https://x.example/ndctl/job/a%20b"
    assert "page" not in message(restarting()).body


@pytest.mark.parametrize(
    "url", ["x.example", "ftp://x", "https://u:p@x", "http://x/?token=a", "http://[1"]
)
def test_an_address_of_a_page_that_is_refused(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        decode(NotifySpec, {"webhook": "http://a/", "page_url": url})
    assert [problem.path for problem in refused.value.problems] == ["page_url"]


def test_receivers_in_a_journal_are_read_by_the_codec_too() -> None:
    """The codec reads lines of another version, and knows fields by the keys of a spec."""
    mail = EmailSpec(to=("a@b",), sender="c@d", user="u", password="env:P", security="tls")
    job = submitted(notify=(NotifySpec(email=mail), NotifySpec(command=("x",), quiet_for=5.0)))
    body = read_json(wire.encode(job))
    assert decode(Event, body) == job


def test_what_there_is_to_tell() -> None:
    assert [one.key for one in notices(started())] == []
    assert [one.key for one in notices(restarting())] == ["incident-1"]
    assert [one.severity for one in notices(restarting())] == ["info"]  # it was a drill
    assert [one.key for one in notices(finished())] == ["incident-1", "recovered-1", "ended-1"]
    assert notices(finished())[-1].on == "succeeded"


def test_a_cancelled_job_is_told_to_those_who_ask_for_it() -> None:
    cancelled = [*started(), CancelRequested(at=START + 20, by="ann"), *stopped()]
    (notice,) = notices(cancelled)
    assert (notice.key, notice.on, notice.severity) == ("ended-1", "cancelled", "info")
    assert message(cancelled).title.startswith("quickstart: CANCELLED: ")
    assert "ann" in message(cancelled).title
    assert wants(NotifySpec(webhook="http://a/", on=("cancelled",)), notice)
    assert not wants(NotifySpec(webhook="http://a/"), notice)


def test_a_stall_is_told_once_for_each_attempt() -> None:
    late = START + 8 + 1801
    assert [one.key for one in notices(started(), late)] == ["stalled-1-1"]
    assert notices(started(), late - 2) == []
    assert notices(started()[:1], late) == []  # no leader: nothing can be told


def test_the_time_in_a_queue_before_the_leader_is_no_stall() -> None:
    late = START + 100_000
    assert notices(started(), late, led_since=late - 60) == []
    assert [one.on for one in notices(started(), late, led_since=late - 1801)] == ["stalled"]


def test_a_program_without_steps_has_recovered_when_its_ranks_run_again() -> None:
    broke, runs = silent_program(), ProgramRuns(at=START + 60, attempt=2)
    assert [one.key for one in notices(broke)] == ["incident-1"]
    again = notices([*broke, runs])
    assert [(one.key, one.at) for one in again] == [
        ("incident-1", START + 30),
        ("recovered-1", START + 60),
    ]
    assert message([*broke, runs], 1).title == "quickstart: recovered after 30 s from exception"
    assert "cause" in dict(message([*broke, runs], 1).rows), "it may have changed since"
    assert "all ranks ran again after 30 s" in message([*broke, runs], 1).text
    # Its first step says how long training stood, and is no second recovery.
    steps = StepReached(at=START + 70, attempt=2, step=1, loss=2.0, tokens_per_second=9.0)
    assert [one.key for one in notices([*broke, runs, steps])] == ["incident-1", "recovered-1"]


def test_a_program_without_steps_stalls_only_while_its_ranks_do_not_run() -> None:
    hours = START + 9000
    runs = [*silent_program(), ProgramRuns(at=START + 60, attempt=2)]
    assert "stalled" not in {one.on for one in notices(runs, hours)}
    # It broke again after hours: it stands since then, and not since it was submitted.
    ended = (HostStopped(at=hours + 1, attempt=2, host=h, finished=False) for h in HOSTS)
    broke = [*runs, replace(killed(hours), attempt=2, step=0), *ended]
    assert "stalled" not in {one.on for one in notices(broke, hours + 1800)}
    assert "stalled-1-3" in {one.key for one in notices(broke, hours + 1801)}


def test_the_last_restart_is_told() -> None:
    events = [submitted(max_restarts=1), *started()[1:], killed(START + 30), *stopped()]
    keys = [one.key for one in notices(events)]
    assert "budget_low-1-2" in keys


def test_incidents_of_an_earlier_submission_are_not_told() -> None:
    again = submitted(at=START + 1000, resume=True)
    assert notices([*recovered(), again], START + 1001) == []


def test_receivers_want_only_what_they_name() -> None:
    (notice,) = notices(restarting())
    assert wants(NotifySpec(webhook="http://a/"), notice)
    assert not wants(NotifySpec(webhook="http://a/", on=("failed",)), notice)
    assert not wants(NotifySpec(webhook="http://a/", min_severity="warning"), notice)


def test_a_message_says_what_where_since_when_what_was_done_and_what_to_type() -> None:
    told = message(restarting())
    assert told.title == "quickstart: rank-killed: rank 1 was killed by SIGKILL (a drill)"
    rows = dict(told.rows)
    assert rows["who"] == "culprit rank 1 on host-0"
    assert rows["ndctl did"].startswith("restart")
    assert rows["since"].startswith("2023-11-1")
    assert rows["since"].rpartition(" ")[2].isalpha()  # the time zone
    assert rows["where"] == "4 ranks on 2 hosts, backend local"
    assert rows["type"] == "ndctl describe quickstart"
    # The journal has step 1 of this attempt. Its rank reported this step when it was killed.
    assert rows["progress"] == "step 24 of 60, checkpoint 20"
    assert told.body["step"] == 24
    assert told.body["event"] == "incident"
    assert told.body["state"] == "RECOVERING"  # for programs, without the reason
    json.dumps(told.body)


def test_text_of_a_job_cannot_look_like_markup() -> None:
    error = RankError(error="E", message="<!channel> & \x1b[31m\u202e*x*", step=3, traceback="")
    died = replace(killed(START + 30), signal=None, exit_code=1, error=error)
    told = message([*started(), died, *stopped()])
    text = slack_text(told)
    assert "<!channel>" not in text
    assert "&lt;!channel&gt; &amp;" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"slack": "https://hooks.slack.com/services/T/B/x"},
        {"webhook": "ftp://a"},
        {"webhook": "https://a/?token=1"},
        {"webhook": "https://u:p@a/"},
        {"webhook": "https://a/", "command": ["x"]},
        {"email": {"to": []}},
        {"email": {"to": ["nobody"]}},
        {"email": {"to": ["a@b"], "user": "a"}},
        {"email": {"to": ["a@b"], "user": "a", "password": "env:P"}},
        {"webhook": "https://a/", "on": ["lunch"]},
    ],
)
def test_receivers_that_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        decode(NotifySpec, given)


class Journal:
    """What a leader does with the lines of a notifier."""

    def __init__(self) -> None:
        self.events: list[NoticeSent] = []

    def __call__(self, event: NoticeSent) -> None:
        self.events.append(event)


def notifier(
    specs: Sequence[NotifySpec],
    events: Sequence[Event],
    journal: Journal,
    environ: dict[str, str] | None = None,
    sent: Sequence[NoticeSent] = (),
    now: float = START + 90,
) -> Notifier:
    run = run_after(events)
    return Notifier(
        specs, RUN_DIR, lambda: run, lambda: now, journal, environ or {}, sent, delays_s=(0.01,)
    )


def test_a_webhook_gets_each_notice_once_although_it_fails_at_first() -> None:
    hook, journal = Hook(codes=[500, 429, 503]), Journal()

    async def run() -> None:
        async with hook.serving() as url:
            one = notifier([NotifySpec(webhook=url, on=ALL)], finished(), journal)
            async with notifying(one):
                await until(lambda: len(journal.events) == 3)
                one.look()
                await one.finish()

    asyncio.run(run())
    assert sorted(body["event"] for body in hook.got) == ["incident", "recovered", "succeeded"]
    assert len(set(hook.ids)) == 3
    assert all(event.delivered for event in journal.events)
    assert sum(event.tries for event in journal.events) == 6
    assert all("s3cret" not in describe_event(event) for event in journal.events)


def test_a_refusal_is_final_and_names_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    hook, journal = Hook(codes=[404]), Journal()

    async def run() -> None:
        async with hook.serving() as url:
            specs = [NotifySpec(slack="env:SLACK")]
            one = notifier(specs, restarting(), journal, {"SLACK": url})
            async with notifying(one):
                await until(lambda: bool(journal.events))

    asyncio.run(run())
    (event,) = journal.events
    assert (event.delivered, event.tries, event.why) == (False, 1, "the server answered HTTP 404")
    assert "s3cret" not in caplog.text
    assert "s3cret" not in str(event)


def test_a_receiver_that_comes_back_gets_its_message() -> None:
    hook, journal = Hook(), Journal()

    async def run() -> None:
        async with hook.serving() as url:
            pass
        one = notifier([NotifySpec(webhook=url)], restarting(), journal)
        async with notifying(one):
            await asyncio.sleep(0.1)
            assert journal.events == []
            async with hook.serving():
                await until(lambda: bool(journal.events))

    asyncio.run(run())
    assert journal.events[0].tries > 1
    assert len(hook.got) == 1


@pytest.mark.parametrize("code", [0, -1])
def test_a_receiver_that_hangs_delays_nothing_else(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivering, "TRY_S", 0.3)
    bad, good, journal = Hook(codes=[0] * 100), Hook(), Journal()

    async def run() -> None:
        async with bad.serving() as slow, good.serving() as url:
            specs = [NotifySpec(webhook=slow), NotifySpec(webhook=url)]
            if code == -1:  # a command that never ends
                argv = (sys.executable, "-c", "import time; time.sleep(3600)")
                specs[0] = NotifySpec(command=argv)
            async with notifying(notifier(specs, restarting(), journal)):
                await until(lambda: bool(journal.events))
                await asyncio.sleep(0.5)

    asyncio.run(run())
    assert [event.receiver for event in journal.events] == ["2 webhook"]


def test_a_leader_that_dies_before_the_journal_line_makes_a_message_come_twice() -> None:
    hook, lost, journal = Hook(), Journal(), Journal()

    async def run() -> None:
        async with hook.serving() as url:
            specs = [NotifySpec(webhook=url)]
            async with notifying(notifier(specs, restarting(), lost)):
                await until(lambda: len(hook.got) == 1)
            # The line was never written. The next leader sends it again and writes it.
            async with notifying(notifier(specs, restarting(), journal)):
                await until(lambda: bool(journal.events))
            # A third leader finds the line.
            last = notifier(specs, restarting(), journal, sent=list(journal.events))
            async with notifying(last):
                last.look()
                await last.finish()

    asyncio.run(run())
    assert len(hook.got) == 2
    assert hook.ids[0] == hook.ids[1]


def test_quiet_for_silences_all_but_the_end() -> None:
    hook, journal = Hook(), Journal()
    second = [*recovered(), CheckpointSaved(at=START + 60, attempt=2, step=40)]
    second += [killed(START + 70, attempt=2), *stopped(START + 71, attempt=2)]

    async def run() -> None:
        async with hook.serving() as url:
            spec = NotifySpec(webhook=url, on=ALL, quiet_for=600.0)
            sent = NoticeSent(
                at=START + 31, notice="incident-1", receiver="1 webhook", delivered=True, tries=1
            )
            async with notifying(notifier([spec], second, journal, sent=[sent])):
                await until(lambda: len(journal.events) == 2)

    asyncio.run(run())
    told = {event.notice: event.why for event in journal.events}
    assert told == {"incident-2": "quiet_for", "recovered-1": ""}


def test_a_message_that_was_given_up_silences_no_later_one() -> None:
    hook, journal = Hook(codes=[404]), Journal()
    second = [*recovered(), CheckpointSaved(at=START + 60, attempt=2, step=40)]
    second += [killed(START + 70, attempt=2), *stopped(START + 71, attempt=2)]

    async def run() -> None:
        async with hook.serving() as url:
            spec = NotifySpec(webhook=url, on=("incident",), quiet_for=600.0)
            one = notifier([spec], recovered(), journal)
            async with notifying(one):
                await until(lambda: len(journal.events) == 1)
                one.run = lambda: run_after(second)
                one.look()
                await until(lambda: len(journal.events) == 2)

    asyncio.run(run())
    assert [(one.notice, one.delivered) for one in journal.events] == [
        ("incident-1", False),
        ("incident-2", True),
    ]


def test_a_clock_that_is_set_back_silences_no_message() -> None:
    hook, journal = Hook(), Journal()
    later = NoticeSent(
        at=START + 1e6, notice="incident-0", receiver="1 webhook", delivered=True, tries=1
    )

    async def run() -> None:
        async with hook.serving() as url:
            spec = NotifySpec(webhook=url, quiet_for=600.0)
            async with notifying(notifier([spec], restarting(), journal, sent=[later])):
                await until(lambda: bool(journal.events))

    asyncio.run(run())
    assert journal.events[0].delivered


def test_mails_of_a_job_with_a_long_name_are_not_taken_for_one() -> None:
    """Mail servers drop a second message with the same id."""
    ids = []
    for key in ("incident-1", "recovered-1"):
        server = MailServer()
        said = replace(message(restarting()), id=f"{'n' * 63}/{key}/1.000")

        async def run(server: MailServer = server, said: Message = said) -> None:
            async with server.serving() as port:
                spec = EmailSpec(to=("a@example.org",), server="127.0.0.1", port=port)
                await deliver(NotifySpec(email=spec), said, {})

        asyncio.run(run())
        (text,) = server.mails
        ids.append(email.message_from_string(text)["Message-ID"])
    assert len(set(ids)) == 2


def sent_by_mail(server: MailServer, **more: Any) -> None:
    async def run() -> None:
        async with server.serving() as port:
            to = ("oncall@example.org", "b@example.org")
            spec = EmailSpec(to=to, server="127.0.0.1", port=port, **more)
            await deliver(NotifySpec(email=spec), message(restarting()), {})

    asyncio.run(run())


def test_a_mail() -> None:
    server = MailServer()
    sent_by_mail(server)
    (text,) = server.mails
    mail = email.message_from_string(text, policy=email.policy.default)
    assert mail["To"] == "oncall@example.org, b@example.org"
    assert mail["Subject"].strip() == (
        "[ndctl] quickstart: rank-killed: rank 1 was killed by SIGKILL (a drill)"
    )
    assert "type: ndctl describe quickstart" in mail.get_content()
    assert mail["Date"].datetime.tzinfo is not None
    assert mail["Auto-Submitted"] == "auto-generated"


@pytest.mark.parametrize(
    ("answer", "final"),
    [({"RCPT": "550 no"}, True), ({"MAIL": "451 later"}, False), ({"MAIL": "550 never"}, True)],
)
def test_a_mail_server_that_refuses(answer: dict[str, str], final: bool) -> None:
    with pytest.raises(Undelivered) as refused:
        sent_by_mail(MailServer(refuses=answer))
    assert refused.value.final is final


def test_a_mail_server_without_encryption_gets_no_password() -> None:
    with pytest.raises(Undelivered):
        sent_by_mail(MailServer(), security="starttls")


def test_a_command_gets_the_message_at_its_input(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    script = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    spec = NotifySpec(command=(sys.executable, "-c", script))
    asyncio.run(deliver(spec, message(restarting()), {}))
    assert json.loads(out.read_text())["event"] == "incident"
    failing = NotifySpec(command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(Undelivered, match="code 3"):
        asyncio.run(deliver(failing, message(restarting()), {}))
    with pytest.raises(Undelivered, match="cannot be run"):
        asyncio.run(deliver(NotifySpec(command=("/nowhere/x",)), message(restarting()), {}))


def test_a_missing_secret_is_named_and_not_its_value(tmp_path: Path) -> None:
    for ref in ("env:NOT_THERE", f"file:{tmp_path / 'none'}"):
        with pytest.raises(Undelivered) as missing:
            asyncio.run(deliver(NotifySpec(slack=ref), message(restarting()), {}))
        assert not missing.value.final
