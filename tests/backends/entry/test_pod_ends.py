"""Exit codes of a pod. If a pod exits with 1 to 127, its operator ends the whole job."""

import sys
import tempfile
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.backends.entry import agent as agent_main
from orchestrator.backends.entry import pod_agent
from orchestrator.backends.entry.pod_agent import Pod, await_launch, run
from orchestrator.backends.kubernetes.mirror.pod_logs import JOURNAL_MARK, METRICS_MARK
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import LeaderStarted
from orchestrator.contract.submission_payload import files_of
from orchestrator.journal import run_dir_init
from orchestrator.journal.journal import Journal
from orchestrator.journal.run_dir_init import begin
from orchestrator.journal.supervisor import Supervisor
from orchestrator.leader import leader_main
from tests.agent.world import SECRET_TEXT, TurnedClock
from tests.backends.handover import handover_of
from tests.backends.kubernetes.rendered import PLAIN, a_launch

CLOCK = TurnedClock()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "job")


@pytest.fixture
def environ(tmp_path: Path, run_dir: RunDir) -> dict[str, str]:
    """Environment of a worker's pod. Its leader has created the run directory."""
    launch = replace(a_launch(PLAIN), run_dir=str(run_dir.path))
    folder = tmp_path / "submission"
    folder.mkdir()
    for name, text in files_of(handover_of(launch, backend="kubernetes")).items():
        (folder / name).write_text(text)
    begin(run_dir, handover_of(launch, backend="kubernetes"), CLOCK, token=False)
    return {
        "NDCTL_NODE_NAME": "node-3",
        "NDCTL_POD_IP": "127.0.0.1",
        "NDCTL_SUBMISSION": str(folder),
        "RANK": "1",
        env.TOKEN: SECRET_TEXT,
    }


@pytest.fixture
def leader_environ(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(pod_agent, "_own", lambda *_: None)
    return {**environ, "RANK": "0"}


def test_a_pod_with_a_full_disk_exits_so_that_it_is_recreated(
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = tmp_path / "full"
    full.touch()  # no user can create a directory below a file
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    assert run(environ) == exit_codes.LEADER_LOST
    assert f"{full}: is not a folder" in caplog.text


def test_a_pod_without_the_token_exits_so_that_it_is_recreated(environ: dict[str, str]) -> None:
    del environ[env.TOKEN]
    assert run(environ) == exit_codes.LEADER_LOST


@pytest.mark.parametrize("begun", [True, False])
def test_a_leader_that_finds_the_journal_locked_is_recreated(
    leader_environ: dict[str, str],
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    begun: bool,
) -> None:
    """A file server may keep the lock of a lost node for longer than the leader waits."""
    monkeypatch.setattr(leader_main, "TAKE_OVER_S", 0.0)
    monkeypatch.setattr(run_dir_init, "PATIENCE_S", 0.0)
    if not begun:
        run_dir.journal.write_bytes(b"")
    with Journal(run_dir.journal, CLOCK):
        assert run(leader_environ) == exit_codes.LEADER_LOST
    assert "is being written by another process" in caplog.text


def test_a_damaged_journal_fails_the_leader_and_a_follower_waits(
    leader_environ: dict[str, str], run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Only a person can fix a damaged journal, and a follower may have read an incomplete copy."""
    whole = run_dir.journal.read_bytes()
    run_dir.journal.write_text("not a journal line\n")
    assert run(leader_environ) == exit_codes.FAILED
    assert "journal line 1 cannot be read" in caplog.text

    class RepairsOnSleep(TurnedClock):
        def sleep(self, seconds: float) -> None:
            run_dir.journal.write_bytes(whole)

    begun = await_launch(run_dir, 1, RepairsOnSleep(), lambda waited_s: None)
    assert begun.job is not None


def test_an_unexpected_exception_is_logged_and_the_pod_is_recreated(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(argv: list[str], environ: dict[str, str]) -> int:
        raise ZeroDivisionError("of an agent")

    monkeypatch.setattr(agent_main, "main", fail)
    assert run(environ) == exit_codes.LEADER_LOST
    last = caplog.records[-1]
    assert (last.levelname, "ZeroDivisionError('of an agent')" in last.message) == (
        "CRITICAL",
        True,
    )


def test_a_recreated_pod_continues_with_the_spec_of_the_launch(
    leader_environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If other objects were applied since, its log and an annotation of the job say so."""
    owned: list[bool] = []
    monkeypatch.setattr(pod_agent, "_own", lambda *args: owned.append(args[-1]))
    monkeypatch.setattr(agent_main, "main", lambda argv, environ: exit_codes.OK)
    assert run(leader_environ) == exit_codes.OK
    folder = Path(leader_environ["NDCTL_SUBMISSION"])
    (folder / "spec.yaml").write_text("name: job\ntrain: {lr: 2}\n")
    assert run(leader_environ) == exit_codes.OK
    assert owned == [True, False]
    assert caplog.text.count("the applied objects differ from the running launch 1 in") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_second_kind_of_job_with_the_same_name_fails(
    leader_environ: dict[str, str], rank: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both jobs are launch 1 and read the same ConfigMap. Without the check, both would lead."""
    environ = {**leader_environ, "RANK": rank, "NDCTL_JOB_KIND": "jobset"}
    assert run(environ) == exit_codes.FAILED
    assert "this pod belongs to a jobset, but launch 1 in" in caplog.text
    assert "to a pytorchjob of the same name" in caplog.text


@pytest.mark.parametrize(
    ("rank", "code", "ended", "expected"),
    [
        (1, exit_codes.FAILED, False, exit_codes.LEADER_LOST),
        (1, exit_codes.FAILED, True, exit_codes.LEADER_LOST),
        (0, exit_codes.FAILED, False, exit_codes.LEADER_LOST),
        (0, exit_codes.FAILED, True, exit_codes.FAILED),
        (0, exit_codes.OK, False, exit_codes.OK),
        (1, exit_codes.NOT_ADMITTED, False, exit_codes.NOT_ADMITTED),
        (0, exit_codes.REQUEUED, False, exit_codes.REQUEUED),
    ],
)
def test_a_pod_exits_as_failed_only_if_the_journal_says_so(
    environ: dict[str, str], run_dir: RunDir, rank: int, code: int, expected: int, *, ended: bool
) -> None:
    if ended:
        with Journal(run_dir.journal, CLOCK) as journal:
            Supervisor(journal).feed(
                LeaderStarted(at=1.0, host="node-0", pid=1, unable="the API says no")
            )
    pod = Pod(host="node", address="::1", node_rank=rank, folder=run_dir.path)
    assert pod_agent._of_the_pod(code, pod, run_dir) == expected


def test_the_log_of_a_pod_ends_with_the_first_and_the_last_metrics(
    run_dir: RunDir, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii"))
    lines = ['{"note":"a line\u2028is not split"}', *(f'{{"step":{n}}}' for n in range(2, 9))]
    run_dir.metrics.write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setitem(pod_agent.MOST_TOLD, METRICS_MARK, 25)
    pod_agent._print_journal(run_dir)
    printed = written.getvalue().decode().split("\n")[:-1]
    metrics = [one.removeprefix(METRICS_MARK) for one in printed if one.startswith(METRICS_MARK)]
    assert metrics == [lines[0], *lines[-2:]]
    journal = [one.removeprefix(JOURNAL_MARK) for one in printed if one.startswith(JOURNAL_MARK)]
    assert journal == run_dir.journal.read_text().splitlines()
