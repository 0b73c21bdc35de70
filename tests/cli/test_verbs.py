"""Each verb of ndctl: its output, its exit code and the modules that it imports."""

import contextlib
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from orchestrator import cli as command_line
from orchestrator.cli import cli
from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import AgentRegistered, CancelRequested, StepReached
from orchestrator.errors import NdctlError
from tests.agent.world import WAIT_S, TurnedClock
from tests.jobs_on_disk import JOB, SPEC, NoCluster, cluster, lead

__all__ = ["cluster"]
AT = TurnedClock().now()


@pytest.fixture(autouse=True)
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path))
    return tmp_path


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1)
def main_with_arguments(arguments: Sequence[str]) -> None:
    """Call `main` with these arguments, so that errors become messages and exit codes."""
    before, sys.argv = sys.argv, ["ndctl", *arguments]
    try:
        command_line.main()
    finally:
        sys.argv = before


def ndctl(*arguments: str) -> Result:
    return CliRunner().invoke(main_with_arguments, ["--", *arguments])


def ndctl_json(*arguments: str) -> dict[str, Any]:
    done = ndctl(*arguments, "--json")
    assert done.exit_code == 0, done.output
    body: dict[str, Any] = json.loads(done.stdout)
    return body


@pytest.fixture
def job(cluster: NoCluster, run_root: Path) -> Path:
    """A job that was submitted, got its agents and a step, and lost its leader."""
    from orchestrator.app.submission import submit_job
    from tests.jobs_on_disk import submission

    run_dir = submit_job.submit(submission(run_root), {}, TurnedClock()).run_dir
    agents = [
        AgentRegistered(
            at=AT, host=f"host-{i}", address="127.0.0.1", devices=2, pid=i, incarnation=str(i)
        )
        for i in range(2)
    ]
    step = StepReached(at=AT + 5, attempt=1, step=1, loss=5.5, tokens_per_second=100.0)
    lead(run_root, *agents, step)
    logs = run_dir.attempt_logs(1, "host-0")
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("a line\nanother line\n")
    return run_dir.path


# Specs


def test_a_valid_spec_is_reported_as_valid() -> None:
    done = ndctl("validate", str(SPEC))
    assert done.exit_code == 0
    assert f"{SPEC}: valid; 4 ranks" in done.output
    body = ndctl_json("validate", str(SPEC))
    assert (body["valid"], body["name"]) == (True, "e2e")


def test_all_problems_of_a_spec_are_reported_at_once() -> None:
    wrong = ("--set", "train.steps=0", "--set", "cluster.hosts=none", "--set", "nmae=x")
    done = ndctl("validate", str(SPEC), *wrong)
    assert done.exit_code == exit_codes.BAD_SPEC
    for path in ("train.steps", "cluster.hosts", "nmae"):
        assert path in done.stderr
    assert done.stdout == ""


def test_a_missing_spec_is_named() -> None:
    done = ndctl("plan", "no-such.yaml")
    assert done.exit_code == exit_codes.BAD_SPEC
    assert "error: no-such.yaml: no such file" in done.stderr


def test_an_impossible_plan_is_refused_with_its_own_code() -> None:
    done = ndctl("plan", str(SPEC), "--set", "parallel.tp=8")
    assert done.exit_code == exit_codes.NO_PLAN
    assert "fix:" in done.stderr


def test_a_plan_is_shown_and_its_json_has_every_rank() -> None:
    assert "tp" in ndctl("plan", str(SPEC)).output
    body = ndctl_json("plan", str(SPEC))
    assert [rank["host"] for rank in body["ranks"]] == ["host-0"] * 2 + ["host-1"] * 2
    wanted = {"mesh", "world_size", "micro_batch_size", "gradient_accumulation", "hosts", "ranks"}
    assert wanted | {"memory", "notes"} <= set(body)


def test_the_schema_is_json() -> None:
    assert json.loads(ndctl("schema").stdout)["type"] == "object"


# Submitting


def test_submit_prints_the_run_directory_and_the_next_command(
    cluster: NoCluster, run_root: Path
) -> None:
    done = ndctl("submit", str(SPEC), "--drill", "kill:rank=1@step=3")
    assert done.exit_code == 0, done.output
    assert f"submitted e2e to local: {run_root / JOB}" in done.output
    assert "ndctl dashboard e2e" in done.output
    assert len(cluster.submitted) == 1


def run_printed_commands(text: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Run every complete command in a text, in the folder `root`."""
    monkeypatch.delenv("NDCTL_RUN_ROOT", raising=False)
    monkeypatch.chdir(root)
    found = re.findall(r"ndctl ((?:status|describe|dashboard|logs|submit) [^`\n]*)", text)
    return [ndctl(*shlex.split(arguments)) for arguments in found]


def test_printed_commands_work_for_jobs_of_another_run_root(
    job: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ndctl("submit", str(SPEC), "--run-root", str(run_root)).stderr
    assert "exists" in output
    monkeypatch.delenv("NDCTL_RUN_ROOT")
    away = run_root / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    root = ("--run-root", str(run_root))
    texts = [ndctl(verb, JOB, *root).output for verb in ("status", "describe")]
    assert all(f"--resume --run-root {run_root}" in text for text in texts)
    assert f"more: ndctl describe {JOB} --run-root" in ndctl("dashboard", JOB, *root).output
    texts.append(ndctl("submit", str(SPEC), "--resume", *root).output)
    assert f"watch it with `ndctl dashboard {JOB} --run-root {run_root}`" in texts[-1]
    results = [done for text in texts for done in run_printed_commands(text, away, monkeypatch)]
    assert len(results) > 4
    for done in results:
        assert done.exit_code == 0 or "no log" in done.stderr or "no agent" in done.stderr


def test_a_second_submit_is_refused_with_both_options(job: Path) -> None:
    done = ndctl("submit", str(SPEC))
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert "was interrupted" in done.stderr
    assert "--resume" in done.stderr
    assert "--new" in done.stderr
    assert ndctl("submit", str(SPEC), "--resume").exit_code == 0


HOSTS = str(SPEC.parents[2] / "examples" / "inventories" / "h100.yaml")


def test_without_a_cluster_a_slurm_job_is_rendered_for_the_hosts_in_a_file(
    run_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    args = (str(SPEC), "--set", "cluster.backend=slurm")
    done = ndctl("validate", *args)
    assert done.exit_code == 6
    assert "is readable, but cannot be planned: there is no Slurm here" in done.output
    assert "--inventory FILE" in done.output
    assert "valid; 4 ranks" in ndctl("validate", *args, "--inventory", HOSTS).output
    done = ndctl("render", *args, "--inventory", HOSTS)
    assert done.exit_code == 0
    assert "#SBATCH --nodes=2" in done.output


def test_an_inventory_file_does_not_describe_this_machine(cluster: NoCluster) -> None:
    for verb in ("submit", "render"):
        done = ndctl(verb, str(SPEC), "--inventory", HOSTS)
        assert done.exit_code == 2
        assert "--backend slurm" in done.output
    assert cluster.submitted == []


def test_resume_and_new_exclude_each_other(cluster: NoCluster) -> None:
    done = ndctl("submit", str(SPEC), "--resume", "--new")
    assert done.exit_code == exit_codes.USAGE
    assert "use either --" in done.stderr
    assert cluster.submitted == []


@pytest.mark.parametrize(
    "fault", ["kill", "kill:rank=1", "melt:rank=1@step=2", "stop:host=1@step=2"]
)
def test_a_drill_in_a_wrong_form_is_a_usage_error_that_shows_the_form(
    cluster: NoCluster, fault: str
) -> None:
    done = ndctl("submit", str(SPEC), "--drill", fault)
    assert done.exit_code == exit_codes.USAGE
    assert "FAULT:rank=R@step=S" in " ".join(done.stderr.split())
    assert cluster.submitted == []


def test_a_backend_that_fails_has_its_own_code(cluster: NoCluster) -> None:
    cluster.broken = True
    done = ndctl("submit", str(SPEC))
    assert (done.exit_code, done.stderr) == (exit_codes.BACKEND, "error: no cluster today\n")


def test_a_dry_run_starts_nothing(cluster: NoCluster, run_root: Path) -> None:
    done = ndctl("submit", str(SPEC), "--dry-run")
    assert done.exit_code == 0
    assert "2 agents would be started" in done.output
    assert cluster.submitted == []
    assert list(run_root.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--dry-run", str(SPEC)), (str(SPEC), "--dry-run=server")])
def test_a_dry_run_asks_the_scheduler_and_fails_if_it_refuses(
    cluster: NoCluster, arguments: tuple[str, ...]
) -> None:
    """`--dry-run` does not take the next argument as its value."""
    done = ndctl("submit", *arguments)
    assert (done.exit_code, "# it would start: at noon" in done.output) == (0, True)
    cluster.obstacle = "partition: must be one of train"
    done = ndctl("submit", *arguments)
    assert done.exit_code == exit_codes.BACKEND
    assert "2 agents would be started" in done.stdout
    assert "error: partition: must be one of train" in done.stderr
    assert cluster.submitted == []


def test_a_client_dry_run_makes_no_request(cluster: NoCluster) -> None:
    cluster.obstacle = "partition: must be one of train"
    done = ndctl("submit", "--dry-run=client", str(SPEC))
    assert done.exit_code == 0
    assert done.stdout.endswith("2 agents would be started\n")
    assert ndctl("submit", str(SPEC), "--dry-run=all").exit_code == exit_codes.USAGE
    assert cluster.submitted == []


def test_reasons_for_waiting_are_warnings_at_submission(cluster: NoCluster) -> None:
    done = ndctl("submit", str(SPEC))
    assert done.exit_code == 0
    assert "warning: hosts: 2 are there\n  fix: wait\n" in done.stderr
    assert len(cluster.submitted) == 1


def test_the_exit_code_of_submit_follow_is_that_of_the_job(
    cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "orchestrator.dashboard.follow.follow_loop.follow_job", lambda *_: exit_codes.CANCELLED
    )
    assert ndctl("submit", str(SPEC), "--follow").exit_code == exit_codes.CANCELLED


def test_interrupting_follow_prints_how_to_see_the_job_again(
    cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.dashboard.follow.follow_loop.follow_job", interrupted)
    done = ndctl("submit", str(SPEC), "--follow")
    assert done.exit_code == exit_codes.INTERRUPTED
    assert "e2e keeps running; watch it with `ndctl dashboard e2e`" in done.stderr


# Status, logs and events


def test_list_shows_the_jobs_of_the_run_root(run_root: Path, job: Path) -> None:
    assert JOB in ndctl("list").output
    assert [row["name"] for row in ndctl_json("list")["jobs"]] == [JOB]
    assert ndctl_json("list", "--run-root", str(run_root / "other"))["jobs"] == []
    assert (
        f"no jobs in {run_root / 'other'}"
        in ndctl("list", "--run-root", str(run_root / "other")).output
    )


def test_status_as_json_has_the_keys_that_scripts_read(job: Path) -> None:
    body = ndctl_json("status", JOB)
    assert (body["name"], body["backend"], body["attempt"], body["step"]) == (JOB, "local", 1, 1)
    assert body["state"] == "FAILED", "its leader is lost"
    assert "--resume" in ndctl("status", JOB).output


def test_the_option_wins_over_the_environment(
    job: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(run_root / "elsewhere"))
    done = ndctl("status", JOB)
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert "existing jobs: none" in done.stderr
    assert ndctl("status", JOB, "--run-root", str(run_root)).exit_code == 0


@pytest.mark.parametrize("verb", ["status", "describe", "logs", "events", "dashboard", "cancel"])
def test_an_unknown_job_is_an_error_with_its_own_code(verb: str, job: Path) -> None:
    done = ndctl(verb, "e3e")
    assert done.exit_code == exit_codes.BAD_JOB_STATE, done.output
    assert "no job 'e3e'" in done.stderr
    assert "existing jobs: e2e" in done.stderr


@pytest.mark.parametrize("verb", ["status", "describe"])
def test_a_job_whose_submission_was_interrupted_gives_an_error_without_traceback(
    verb: str, run_root: Path
) -> None:
    (run_root / JOB).mkdir()
    (run_root / JOB / "journal.jsonl").touch()
    done = ndctl(verb, JOB)
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert "did not finish" in done.stderr


def test_describe_shows_everything_known(job: Path) -> None:
    assert "host-1" in ndctl("describe", JOB).output
    body = ndctl_json("describe", JOB)
    added = body.keys() - ndctl_json("status", JOB).keys()
    assert added == {"settings", "plan", "ranks", "spares", "metrics"}
    assert body["plan"]["world_size"] == 4
    assert [(host["host"], host["first_rank"]) for host in body["ranks"]] == [
        ("host-0", 0),
        ("host-1", 2),
    ]
    assert all(len(host["health"]) == 2 for host in body["ranks"])
    assert body["hosts"] == ["host-0", "host-1"]


def test_events_are_lines_and_as_json_each_is_one_object(job: Path) -> None:
    assert "host-0" in ndctl("events", JOB).output
    lines = ndctl("events", JOB, "--json").stdout.splitlines()
    assert [json.loads(line)["event"]["kind"] for line in lines] == [
        *("JobSubmitted", "LeaderStarted", "AgentRegistered", "AgentRegistered", "StepReached")
    ]


def test_a_log_without_a_line_says_so(job: Path) -> None:
    log = job / "logs" / "attempt-1" / "host-0" / "rank-0.log"
    log.write_text("")
    said = ndctl("logs", JOB, "--rank", "0", "--attempt", "1")
    assert (said.exit_code, said.stdout) == (0, "")
    assert said.stderr == f"rank 0 printed nothing in attempt 1 ({log})\n"
    assert "no rank printed anything in attempt 1" in ndctl("logs", JOB).stderr
    log.write_text("a line\n")
    assert ndctl("logs", JOB, "--grep", "other").stderr == ""


def test_lines_of_logs_have_host_and_rank(job: Path) -> None:
    assert ndctl("logs", JOB).output.splitlines()[-1].endswith("another line")
    assert "[host-0 rank 0] a line" in ndctl("logs", JOB, "--rank", "0", "--attempt", "1").output
    assert len(ndctl("logs", JOB, "--tail", "1").output.splitlines()) == 1
    done = ndctl("logs", JOB, "--rank", "9")
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert "attempts with logs: 1" in done.stderr


def test_the_dashboard_of_a_job_that_ended_is_drawn_once(job: Path, run_root: Path) -> None:
    lead(run_root, CancelRequested(at=AT + 9, by="me"))
    done = ndctl("dashboard", JOB)
    assert done.exit_code == 0, done.output
    assert "CANCELLED" in done.output


def test_cancel_ends_a_job_and_a_second_one_is_refused(job: Path, cluster: NoCluster) -> None:
    done = ndctl("cancel", JOB)
    assert done.exit_code == 0, done.output
    assert "without a leader; Slurm job 12 had already ended" in done.output
    assert "e2e: CANCELLED" in done.output
    again = ndctl("cancel", JOB, "--no-wait")
    assert again.exit_code == exit_codes.BAD_JOB_STATE
    assert "already ended: CANCELLED" in again.stderr


# Doctor


def test_the_exit_code_of_doctor_shows_whether_a_job_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from orchestrator.contract.check_results import Finding

    findings = [Finding(what="disk", verdict="ok", found="enough")]
    monkeypatch.setattr("orchestrator.health.machine.examine", lambda *_: tuple(findings))
    done = ndctl("doctor", str(SPEC))
    inputs = "   ok  inputs         all inputs of the spec exist\n"
    assert (done.exit_code, done.output) == (0, f"   ok  disk           enough\n{inputs}")
    findings.append(Finding(what="ports", verdict="stops", found="none", fix="open one"))
    done = ndctl("doctor", "--json")
    assert done.exit_code == 1
    assert [found["verdict"] for found in json.loads(done.stdout)["findings"]] == [*("ok", "stops")]


def test_doctor_reports_what_submit_would_refuse_on_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.contract.check_results import Finding
    from orchestrator.errors import PlanError, Unanswered

    site = [Finding(what="partition", verdict="ok", found="train is UP")]
    errors: list[NdctlError] = [PlanError("no plan", fix="ask for fewer"), Unanswered("no answer")]

    def refuse(*_: object, purpose: str) -> None:
        assert purpose == "submit"
        raise errors.pop(0)

    monkeypatch.setattr("orchestrator.health.machine.examine", lambda *_: ())
    monkeypatch.setattr("orchestrator.doctor.slurm.examine_slurm", lambda *_: tuple(site))
    monkeypatch.setattr("orchestrator.app.planning.plans.plan_spec", refuse)
    argv = ("doctor", str(SPEC), "--backend", "slurm")
    done = ndctl(*argv)
    assert done.exit_code == 1
    assert "stops  submit         no plan\n                      fix: ask for fewer" in done.output
    assert ndctl(*argv).exit_code == 0, "an answer that is missing refuses nothing"
    site.append(Finding(what="controller", verdict="stops", found="down", fix="wait"))
    assert "submit" not in ndctl(*argv).output


def test_doctor_asks_a_silent_api_server_once_and_tells_an_error_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from orchestrator.errors import BackendError, Unreachable
    from tests.backends.kubernetes.fake_api import FakeApi

    refusal: list[BackendError] = [Unreachable("no answer in 30 s", fix="start it")]

    def refuse(*_: object, purpose: str) -> None:
        raise refusal[0]

    api = FakeApi()
    monkeypatch.setattr("orchestrator.health.machine.examine", lambda *_: ())
    monkeypatch.setattr("orchestrator.app.planning.planned_hosts.kubernetes_api", lambda *_: api)
    monkeypatch.setattr("orchestrator.app.planning.plans.plan_spec", refuse)
    argv = ("doctor", "examples/kubernetes.yaml")
    done = ndctl(*argv)
    assert done.exit_code == 1
    assert "stops  api server     no answer in 30 s" in done.output
    assert "version" not in done.output, "this server answers nothing else"

    refusal[0] = BackendError("you are not logged in", fix="log in")
    api.paths = {"/version": refusal[0]}
    assert ndctl(*argv).output.count("you are not logged in") == 1


# The command line itself


def test_an_unknown_verb_is_a_usage_error() -> None:
    done = ndctl("sumbit")
    assert done.exit_code == exit_codes.USAGE
    assert "No such command 'sumbit'" in done.stderr


@pytest.mark.parametrize("verb", cli.commands)
def test_help_of_a_verb_has_an_example(verb: str) -> None:
    assert f"Example: ndctl {verb}" in " ".join(ndctl(verb, "--help").output.split())


def test_exit_codes_are_in_the_help() -> None:
    shown = " ".join(ndctl("--help").output.split())
    assert "3 bad spec, 4 no plan, 5 job state, 6 backend, 7 cancelled, 130 interrupted" in shown


def test_every_error_of_ndctl_has_a_documented_code() -> None:
    kinds: list[type[NdctlError]] = [NdctlError, *NdctlError.__subclasses__()]
    for kind in kinds:
        assert kind.exit_code in {code for name, code in vars(exit_codes).items() if name.isupper()}


def test_job_names_are_completed_in_the_run_root(
    job: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(*arguments: str, incomplete: str) -> list[str]:
        items = ShellComplete(cli, {}, "ndctl", "_C").get_completions(list(arguments), incomplete)
        return [item.value for item in items]

    assert completed("status", incomplete="") == [JOB]
    assert completed("logs", incomplete="x") == []
    monkeypatch.delenv("NDCTL_RUN_ROOT")
    monkeypatch.chdir(run_root.parent)
    assert completed("status", incomplete="e") == []
    assert completed("status", "--run-root", str(run_root), incomplete="e") == [JOB]


@pytest.mark.process
def test_python_m_orchestrator_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--version"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stdout.startswith("ndctl, version ")


IMPORTED = """
import sys
from orchestrator.cli import main
sys.argv = ["ndctl", *sys.argv[1:]]
try:
    main()
except SystemExit as exc:
    assert not exc.code, exc.code
print("MODULES", *sorted(sys.modules))
"""


def imported_by(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


HEAVY = {"torch", "transformers", "numpy", "pydantic", "aiohttp", "rich", "asyncio"}


@pytest.mark.process
def test_help_imports_few_modules() -> None:
    modules = imported_by("--help")
    assert not modules & {*HEAVY, "yaml", "urllib.request"}
    ours = {name for name in modules if name.startswith("orchestrator.")}
    assert ours <= {
        *(name for name in ours if name.startswith("orchestrator.cli")),
        "orchestrator.errors",
        *("orchestrator.contract", "orchestrator.contract.files.exit_codes"),
        "orchestrator.contract.visible",
    }


@pytest.mark.process
def test_status_imports_no_yaml_drawing_or_network_modules(job: Path) -> None:
    assert not imported_by("status", JOB) & {*HEAVY, "yaml"}


@pytest.mark.process
def test_plan_imports_no_drawing_network_or_training_modules() -> None:
    assert not imported_by("plan", str(SPEC)) & HEAVY


def test_inventory_shows_a_file_as_a_tree(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("{profile: cpu, hosts: 4, devices_per_host: 2, hosts_per_leaf: 2}")
    done = ndctl("inventory", "--inventory", str(path))
    assert done.exit_code == 0
    assert "leaf-1 … leaf-2 (2)  2 hosts free each  host-1 … host-4" in done.stdout
    found = ndctl_json("inventory", "--inventory", str(path))
    assert found["devices"] == 8


def test_inventory_shows_this_machine() -> None:
    done = ndctl("inventory")
    assert done.exit_code == 0
    assert done.stdout.startswith("1 host free")


def test_an_inventory_with_a_mistake_is_a_bad_spec(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("{profile: h100, hosts: 4, devices_per_host: 2}")
    done = ndctl("inventory", "--inventory", str(path))
    assert done.exit_code == exit_codes.BAD_SPEC
    assert "hosts.yaml:1: profile: must be one of h100-sxm-80gb" in done.stderr


def test_saving_more_than_training_is_named_beside_failures() -> None:
    spec = str(Path(__file__).parents[2] / "examples/llama3-8b.yaml")
    often = ("--set", "cluster.gpu=h100-sxm-80gb", "--set", "checkpoint.every_steps=1")
    said = " ".join(ndctl("plan", spec, *often).stdout.split())
    assert re.search(r"saving checkpoints takes [\d.]+% of the time, less with a larger", said)


def test_a_plain_value_under_the_name_of_a_secret_gives_a_warning() -> None:
    root = Path(__file__).parents[2]
    arguments = (str(root / "examples/kubernetes.yaml"), "--inventory")
    hosts = str(root / "examples/inventories/h100.yaml")
    setting = ("--set", "cluster.kubernetes.env.HF_TOKEN=abc")
    for verb in ("validate", "plan"):
        assert ndctl(verb, *arguments, hosts).stderr == ""
        done = ndctl(verb, *arguments, hosts, *setting, "--json")
        assert done.exit_code == 0
        json.loads(done.stdout)
        assert "cluster.kubernetes.env.HF_TOKEN looks like a secret" in done.stderr
        assert "HF_TOKEN: {secret: kubernetes-demo-env, key: HF_TOKEN}" in done.stderr
        assert "abc" not in done.stderr


def test_a_plain_value_under_the_name_of_a_secret_gives_a_warning_on_slurm() -> None:
    root = Path(__file__).parents[2]
    hosts = str(root / "examples/inventories/h100.yaml")
    arguments = ("plan", str(root / "examples/slurm.yaml"), "--inventory", hosts)
    assert ndctl(*arguments, "--set", "cluster.slurm.env.WANDB_MODE=offline").stderr == ""
    done = ndctl(*arguments, "--set", "cluster.slurm.env.WANDB_API_KEY=abc")
    assert done.exit_code == 0
    assert "cluster.slurm.env.WANDB_API_KEY looks like a secret" in done.stderr
    assert "`- export WANDB_API_KEY=$(cat FILE)` to cluster.slurm.setup" in done.stderr
    assert "abc" not in done.stderr


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """A user with only the access rights of other users."""
    if os.geteuid() != 0:
        mode = folder.stat().st_mode
        folder.chmod(0)
        yield
        folder.chmod(mode)
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_directory_is_private_to_its_owner(
    cluster: NoCluster, run_root: Path, umask: int
) -> None:
    from orchestrator.app.submission import submit_job
    from tests.jobs_on_disk import submission

    before = os.umask(umask)
    try:
        run_dir = submit_job.submit(submission(run_root), {}, TurnedClock()).run_dir
    finally:
        os.umask(before)
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    for above in (run_root, *itertools.takewhile(lambda p: p != Path("/tmp"), run_root.parents)):
        above.chmod(above.stat().st_mode | 0o755)
    verbs = ("status", "logs", "describe", "events", "diagnose", "dashboard", "cancel")
    for verb in verbs:  # imports all modules: the other user cannot read them
        assert ndctl(verb, "nothing").exit_code == exit_codes.BAD_JOB_STATE
    with another_user(run_dir.path):
        for verb in verbs:
            done = ndctl(verb, JOB)
            assert done.exit_code == exit_codes.BAD_JOB_STATE, (verb, done.output)
            assert f"{run_dir.path} cannot be read: it is the run directory of user" in done.stderr
        assert ndctl("list").exit_code == 0
    (advised,) = re.findall(r"`(find [^`]+)`", done.stderr)
    subprocess.run(["sh", "-c", advised], check=True)
    assert stat.S_IMODE(run_dir.journal.stat().st_mode) & 0o070 == 0o040
    assert stat.S_IMODE(run_dir.token.stat().st_mode) == 0o600, (
        "with it the group could end the job"
    )
    for path in (run_dir.path, *run_dir.path.rglob("*")):  # the owner opens it to all
        path.chmod(0o755)
    with (
        another_user(run_dir.path.parent / "nothing")
        if os.geteuid() == 0
        else (contextlib.nullcontext())
    ):
        assert ndctl("status", JOB).exit_code == 0
