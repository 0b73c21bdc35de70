"""Jobs that are found from any folder: by the list, by name, by pattern."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ndctl as ndctl_package
from orchestrator.app.fleet import known_jobs as known_jobs_module
from orchestrator.app.fleet.known_jobs import HANGS, ROOT_HANGS, Scope, known_jobs
from orchestrator.app.fleet.summaries import Reader
from orchestrator.backends.kubernetes.mirror.mirror_paths import REMOTE, folder_of
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.messages.events import CancelRequested
from orchestrator.dashboard.fleet.row import is_old
from orchestrator.errors import JobError
from orchestrator.journal.journal import Journal
from orchestrator.posix.crew import Crew
from orchestrator.registry.store import own_entries
from tests.agent.world import TurnedClock
from tests.cli.test_verbs import another_user, ndctl, ndctl_json
from tests.dashboard.dashboard_story import StoryClock, finished
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster, lead
from tests.web.served_jobs import renamed, written

__all__ = ["cluster"]


@pytest.fixture
def elsewhere(cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without jobs, while `JOB` runs in the run root that is returned."""
    monkeypatch.delenv("NDCTL_RUN_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "project" / "runs"
    assert ndctl("submit", str(SPEC), "--run-root", str(root)).exit_code == 0
    return root


def names(*arguments: str) -> list[str]:
    return [row["name"] for row in ndctl_json("list", *arguments)["jobs"]]


def test_a_job_is_listed_and_found_by_name_from_any_folder(elsewhere: Path) -> None:
    assert names() == [JOB]
    assert names("--run-root", str(elsewhere.parent)) == []
    assert ndctl_json("status", JOB)["run_dir"] == str(elsewhere / JOB)
    for verb in ("describe", "events"):
        assert ndctl(verb, JOB).exit_code == 0, verb
    assert f"{JOB}: SUBMITTED" in ndctl("status", "e2*").output
    assert ndctl("status", JOB, "--run-root", "other").exit_code == exit_codes.BAD_JOB_STATE
    assert ndctl("cancel", "e2*", "--no-wait").exit_code == 0


def test_the_printed_commands_work_from_the_folder_where_they_are_printed(elsewhere: Path) -> None:
    assert f"ndctl logs {JOB} --agents --run-root {elsewhere}" in ndctl("status", JOB).output


def test_two_jobs_of_one_name_are_listed_with_what_to_type(elsewhere: Path, tmp_path: Path) -> None:
    other = tmp_path / "other project"
    assert ndctl("submit", str(SPEC), "--run-root", str(other)).exit_code == 0
    assert names() == [JOB, JOB]
    done = ndctl("status", JOB)
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert f"2 jobs are named {JOB}" in done.stderr
    assert f"`--run-root {elsewhere}`" in done.stderr
    assert f"`--run-root '{other}'`" in done.stderr
    assert ndctl("status", JOB, "--run-root", str(other)).exit_code == 0


def test_a_removed_run_directory_is_reported(elsewhere: Path) -> None:
    shutil.rmtree(elsewhere)
    done = ndctl("list")
    assert done.exit_code == 0, done.output
    assert f"1 registered without a run directory here: {JOB}" in done.stderr
    (row,) = ndctl_json("list")["jobs"]
    assert (row["state"], row["step"]) == ("GONE", None)
    assert "was removed, or its file system is not mounted" in row["reason"]
    assert f"{elsewhere / JOB} does not exist" in ndctl("status", JOB).stderr
    assert "does not exist" in ndctl("list", "--state", "gone").stdout


def test_a_job_of_another_machine_says_where_it_was_submitted(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = own_entries(os.environ)
    one.path.write_bytes(
        one.path.read_bytes()
        .replace(one.entry.machine.encode(), b"login-2")
        .replace(b"/runs/", b"/gone/")
    )
    rows = ndctl_json("list")["jobs"]
    assert ["it was submitted on login-2" in row["reason"] for row in rows] == [True]


def test_filters_of_state_and_user(elsewhere: Path) -> None:
    assert names("--state", "submitted,failed") == [JOB]
    assert names("--state", "running") == []
    assert names("--user", "nobody-of-this-name") == []
    (row,) = ndctl_json("list")["jobs"]
    assert names("--user", row["user"]) == [JOB]
    done = ndctl("list", "--state", "runing")
    assert done.exit_code == exit_codes.USAGE
    assert "RUNING is no state; did you mean RUNNING? States: SUBMITTED" in done.stderr


def test_an_archived_run_is_listed_on_request(elsewhere: Path) -> None:
    lead(elsewhere, CancelRequested(at=TurnedClock().now(), by="alice"))
    assert ndctl("submit", str(SPEC), "--run-root", str(elsewhere), "--new").exit_code == 0
    assert names() == [JOB]
    archived = [row for row in ndctl_json("list", "--all")["jobs"] if row["archived"]]
    assert [row["name"].startswith(f"{JOB}-20") for row in archived] == [True]
    assert "archived" in ndctl("list", "--all").output


def test_a_summary_is_kept_until_the_files_change(elsewhere: Path, state_home: Path) -> None:
    lead(elsewhere, CancelRequested(at=TurnedClock().now(), by="alice"))
    assert ndctl_json("list")["jobs"][0]["state"] == "CANCELLED"
    kept = state_home / "ndctl" / "summaries.json"
    body = json.loads(kept.read_text())
    (one,) = body["jobs"].values()
    one["summary"]["attempt"] = 77  # recognizable
    kept.write_text(json.dumps(body))
    assert ndctl_json("list")["jobs"][0]["attempt"] == 77
    with (elsewhere / JOB / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert ndctl_json("list")["jobs"][0]["attempt"] != 77
    for damaged in (
        "",
        "[" * 10_000,
        "{}",
        '{"v": 99, "jobs": {}}',
        '{"v":1,"jobs":{"a":[[],{}]}}',
    ):
        kept.write_text(damaged)
        assert ndctl_json("list")["jobs"][0]["state"] == "CANCELLED"


def test_a_damaged_job_does_not_hide_the_others(elsewhere: Path) -> None:
    assert (
        ndctl("submit", str(SPEC), "--run-root", str(elsewhere), "--set", "name=bad").exit_code == 0
    )
    journal = elsewhere / "bad" / "journal.jsonl"
    journal.write_text("no journal\n" + journal.read_text())
    rows = {row["name"]: row for row in ndctl_json("list")["jobs"]}
    assert rows[JOB]["state"] == "SUBMITTED"
    assert rows["bad"]["state"] == "UNKNOWN"
    assert f"{journal}: journal line 1 cannot be read" in rows["bad"]["reason"]


def test_a_damaged_copy_of_a_job_in_a_cluster_does_not_hide_the_others(elsewhere: Path) -> None:
    copy = folder_of(elsewhere, "prod", "team", "far")
    copy.mkdir(parents=True)
    (copy / REMOTE).write_text("{")
    rows = {row["name"]: row for row in ndctl_json("list", "--run-root", str(elsewhere))["jobs"]}
    assert rows[JOB]["state"] == "SUBMITTED"
    assert rows["far"]["state"] == "UNKNOWN"
    assert f"remove the copy with `rm -r {copy}`" in rows["far"]["reason"]

    at = ("--run-root", str(elsewhere))
    assert f"{JOB}: SUBMITTED" in ndctl("status", f"{JOB[:-1]}*", *at).output
    said = ndctl("status", "x-*", *at).output
    assert "no job matches 'x-*'" in said
    assert f"jobs: {JOB}, far" in said
    assert [job.name for job in ndctl_package.jobs(f"{JOB[:-1]}*", run_root=elsewhere)] == [JOB]


def test_a_run_directory_without_its_journal_is_not_called_removed(elsewhere: Path) -> None:
    (elsewhere / JOB / "journal.jsonl").unlink()
    (row,) = ndctl_json("list")["jobs"]
    assert row["reason"] == f"{elsewhere / JOB} has no journal.jsonl any more"


def test_the_index_shows_jobs_of_others_without_trust(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's entry may point anywhere: to a pipe, to my files, to a private folder."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to write as another user")
    index = tmp_path / "index"
    index.mkdir()
    index.chmod(0o1777)
    monkeypatch.setenv(env.INDEX, str(index))
    (own,) = own_entries(os.environ)
    folder = index / "mallory"
    folder.mkdir()
    pipe = tmp_path / "pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "journal.jsonl")
    for name, path in (("pipe", pipe), (JOB, elsewhere / JOB), ("gone", tmp_path / "gone")):
        text = own.path.read_text().replace(f'"{elsewhere / JOB}"', f'"{path}"')
        (folder / f"{name}.json").write_text(text.replace(f'"name":"{JOB}"', f'"name":"{name}"'))
    for one in (folder, *folder.iterdir()):
        os.chown(one, 65534, 65534)
    shutil.rmtree(own.path.parent)  # so that only the entry of the other user names the job
    rows = {row["name"]: row for row in ndctl_json("list")["jobs"]}
    assert {row["user"] for row in rows.values()} == {"nobody"}
    assert "not a file of nobody" in rows["pipe"]["reason"]
    assert "not a file of nobody" in rows[JOB]["reason"]
    assert rows["gone"]["state"] == "GONE"
    assert ndctl("status", JOB).exit_code == exit_codes.BAD_JOB_STATE


def test_a_private_run_directory_of_another_user_is_named(elsewhere: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    index = tmp_path / "index"
    index.mkdir()
    index.chmod(0o1777)
    told = {env.INDEX: str(index), "HOME": "/nonexistent"}
    (own,) = own_entries(os.environ)
    (index / "root").mkdir()
    shutil.copy(own.path, index / "root")
    for above in (*elsewhere.parents, elsewhere):
        if above.is_relative_to("/tmp") and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o755)
    from orchestrator.app.fleet.known_jobs import Scope, known_jobs

    reader = Reader(told, TurnedClock())
    with another_user(elsewhere / JOB):
        jobs = known_jobs(Scope(), told, TurnedClock())
        (row,), _ = reader.rows(jobs)
    assert (row.state, row.user) == ("UNKNOWN", "root")
    assert "you have no access" in row.note


def test_completion_knows_registered_jobs(elsewhere: Path) -> None:
    from click.shell_completion import ShellComplete

    from orchestrator.cli import cli

    items = ShellComplete(cli, {}, "ndctl", "_C").get_completions(["status"], "e")
    assert [item.value for item in items] == [JOB]


def test_hosts_of_all_jobs_are_shown_from_any_folder(elsewhere: Path) -> None:
    assert "no strikes" in ndctl("hosts").output
    assert ndctl_json("hosts", "--all")["hosts"] == [], "a job that only waits has no hosts"
    lead(elsewhere)
    with Journal(elsewhere / JOB / "journal.jsonl", TurnedClock()):  # its leader lives
        hosts = ndctl_json("hosts", "--all")["hosts"]
        assert [host["host"] for host in hosts] == ["host-0", "host-1"]
        assert [job["name"] for job in hosts[0]["jobs"]] == [JOB]
        assert f"used by {JOB}" in ndctl("hosts", "show", "host-1").output
    assert ndctl("hosts", "show", "host-7").exit_code == exit_codes.BAD_JOB_STATE


PATIENT_S = 1.0
"""A busy machine reads a job that does not hang within this time."""


def test_a_run_directory_that_hangs_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, back = tmp_path / "runs", threading.Event()
    for name in ("hangs", "works"):
        written(root / name, renamed(finished(), name))
    hang(monkeypatch, "_ask_storage", lambda journal: journal.parent.name == "hangs", back)
    crew, scope = Crew(slow_s=PATIENT_S), Scope(run_root=str(root))
    for _ in range(3):
        found = known_jobs(scope, {}, StoryClock(), crew)
        assert {job.path.name: job.problem for job in found} == {"hangs": HANGS, "works": ""}
    assert len(crew.unfinished()) == 1
    back.set()


def hang(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    where: Callable[[Path], bool],
    back: threading.Event,
) -> None:
    """Calls of the function `name` about such a path hang until `back` is set."""
    real = getattr(known_jobs_module, name)

    def slow(path: Path) -> object:
        if where(path):
            back.wait(60)
        return real(path)

    monkeypatch.setattr(known_jobs_module, name, slow)


def test_a_run_root_that_hangs_is_reported_beside_the_other_jobs(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, dead = threading.Event(), tmp_path / "dead"
    hang(monkeypatch, "folders", lambda path: path == dead, back)
    environ = {**os.environ, env.RUN_ROOT: str(dead)}
    reader = Reader(environ, StoryClock())
    reader.crew = Crew(slow_s=PATIENT_S)
    for scope in (Scope(), Scope(archived=True)):
        jobs = known_jobs(scope, environ, StoryClock(), reader.crew)
        rows, _ = reader.rows(jobs)
        assert {row.name: row.note for row in rows if row.state == "UNKNOWN"} == {
            "dead": ROOT_HANGS
        }
        assert JOB in {row.name for row in rows}
        assert not any(is_old(row, StoryClock().now()) for row in rows if row.name == "dead")
    assert len(reader.crew.unfinished()) == 1, "each look would keep a thread"
    with pytest.raises(JobError, match=r"no job matches 'x', but .* does not respond"):
        known_jobs(Scope(patterns=("x",)), environ, StoryClock(), reader.crew)
    back.set()


def test_a_run_root_in_a_folder_of_another_user_is_an_error(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(known_jobs_module, "folders", refuse)
    with pytest.raises(PermissionError):
        known_jobs(Scope(), os.environ, StoryClock())
    assert caplog.text == "", "the command says it, without a traceback"


def test_summaries_of_storage_that_hangs_are_kept(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`list` of one run root writes the summaries of the others too, without waiting for them."""
    back, other, real = threading.Event(), tmp_path / "other", Path.exists
    for root in (other, tmp_path / "gone", tmp_path / "third"):
        written(root / "a", renamed(finished(), "a"))
        names("--run-root", str(root))
    shutil.rmtree(tmp_path / "gone")

    def exists(path: Path, **more: bool) -> bool:
        if path == other / "a":
            back.wait(60)
        return real(path, **more)

    reader = Reader(os.environ, StoryClock())
    reader.crew = Crew(slow_s=PATIENT_S)
    monkeypatch.setattr(Path, "exists", exists)
    written(tmp_path / "new" / "b", renamed(finished(), "b"))
    reader.rows(known_jobs(Scope(run_root=str(tmp_path / "new")), os.environ, StoryClock()))
    kept = json.loads((state_home / "ndctl" / "summaries.json").read_text())["jobs"]
    roots = {Path(path).parent.name for path in kept}
    assert roots == {"other", "third", "new"}
    back.set()
