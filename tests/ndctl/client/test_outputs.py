"""What a job tells: status, metrics, events and logs, also with hostile text in them."""

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import ndctl
from ndctl.client.reading import metrics_of
from orchestrator.app.remote import Found
from orchestrator.cli.plans import plan as plan_command
from orchestrator.contract.files.run_dir import RunDir
from tests.ndctl.client.programs import work, write_script

pytestmark = pytest.mark.process
HOSTILE = "<script>alert(1)</script> & \x1b]0;title\x07 \u202e"
STEPS = f"""
import os
import ndctl
rank = int(os.environ["RANK"])
print({HOSTILE!r}, "of", rank)
for step in range(1, 6):
    ndctl.log(step, loss=1 / step, lr=0.5)
"""
PRINTED = """
import time
for step in range(1, 6):
    print(f"step {step} loss {1 / step}", flush=True)
time.sleep(3)  # agents read logs once a second
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ndctl.Job:
    """A job of two ranks whose logs have its steps and hostile text."""
    folder = tmp_path_factory.mktemp("told")
    spec = {
        "name": "told",
        "run": {"script": write_script(folder, STEPS), "env": {"TEXT": HOSTILE}},
        "cluster": {"gpus_per_host": 2},
    }
    job = ndctl.submit(spec, run_root=folder / "runs")
    job.wait(check=True)
    return job


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen = set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


def assert_harmless(html: str) -> None:
    tags = Tags()
    tags.feed(html)
    assert tags.seen <= {"table", "caption", "tr", "th", "td", "pre", "tbody"}
    assert not re.search("[\x00-\x08\x1b\x07\u202e]", html)


def test_lines_of_all_ranks_or_of_one_are_as_they_were_printed(told: ndctl.Job) -> None:
    hello = [line for line in told.logs() if "script" in line.text]
    assert {(line.host, line.rank, line.program) for line in hello} == {
        ("host-0", 0, "rank"),
        ("host-0", 1, "rank"),
    }
    (own,) = told.logs(rank=1)
    assert own.text == f"{HOSTILE} of 1"
    assert "\x1b" not in str(own)
    assert "\\x1b]0;title\\x07" in str(own)
    assert [line.text for line in told.logs(rank=0, tail=1)] == [f"{HOSTILE} of 0"]
    assert [line.text for line in told.logs(rank=1, follow=True)] == [own.text]


def test_logs_that_do_not_exist_are_an_error_at_the_call(told: ndctl.Job) -> None:
    with pytest.raises(ndctl.JobError, match="attempts with logs: 1"):
        told.logs(rank=7)
    with pytest.raises(ndctl.JobError, match="attempt"):
        told.logs(attempt=3)
    with pytest.raises(ValueError, match="tail is -1"):
        told.logs(tail=-1)
    with pytest.raises(TypeError, match="rank is '0'"):
        told.logs(rank="0")  # type: ignore[arg-type]


def test_metrics_are_the_steps_of_rank_0(told: ndctl.Job) -> None:
    metrics = told.metrics()
    assert [one.step for one in metrics] == [1, 2, 3, 4, 5]
    assert (metrics[3].loss, metrics[3].values["lr"], metrics[3].attempt) == (0.25, 0.5, 1)
    status = told.status()
    assert (status.step, status.loss) == (5, 0.2)


def test_metrics_of_a_program_without_ndctl_are_those_of_its_log(tmp_path: Path) -> None:
    reads = {"step": r"step (\d+)", "loss": r"loss ([\d.]+)"}
    job = ndctl.run(
        [write_script(tmp_path, PRINTED)],
        name="printed",
        gpus_per_host=1,
        run_root=tmp_path,
        set={"run.metrics": reads},
    )
    job.wait(check=True)
    last = job.metrics()[-1]
    assert (last.step, last.loss, last.attempt) == (5, 0.2, 1)


def test_steps_that_a_restart_repeats_are_there_once_and_torn_lines_are_ignored(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    found = Found(RunDir(tmp_path))
    assert metrics_of(found) == []
    path.write_text(
        '{"step": 1, "attempt": 1, "time": 1.0, "loss": 9, "loss_is": "ok"}\n'
        '{"step": 2, "attempt": 1, "loss": NaN, "deep": [1]}\n'
        '{"step": 3, "attempt": 1, "loss": 7}\nnoise\n[]\n{"step": null, "attempt": 1}\n'
        '{"step": 2, "attempt": 2, "loss": 8}\n{"step": 3, "att'
    )
    metrics = metrics_of(found)
    assert [(one.step, one.attempt, one.loss, one.time) for one in metrics] == [
        (1, 1, 9, 1.0),
        (2, 2, 8, None),
    ]
    assert metrics[0].values == {"loss": 9, "loss_is": "ok"}


def test_events_are_those_of_the_journal_with_what_was_decided(told: ndctl.Job) -> None:
    events = told.events()
    assert [one.seq for one in events] == list(range(1, len(events) + 1))
    assert events[0].kind == "JobSubmitted"
    started = next(one for one in events if one.actions)
    assert started.actions[0]["kind"] == "StartAttempt"
    assert events[-1].actions[-1]["kind"] == "EndJob"
    assert "SUCCEEDED" in str(events[-1])
    assert all(abs(one.at - time.time()) < 3600 for one in events)


def test_html_has_no_tag_and_no_control_character_of_a_job(told: ndctl.Job) -> None:
    for value in (told, told.status()):
        html = value._repr_html_()
        assert_harmless(html)
        assert "told: SUCCEEDED" in html
        assert "step 5" in html


def test_text_of_a_failure_is_escaped(tmp_path: Path) -> None:
    fails = write_script(tmp_path, f"raise ValueError({HOSTILE!r})")
    job = ndctl.run([fails], name="hostile", run_root=tmp_path, set={"resilience.max_restarts": 0})
    status = job.wait()
    assert status.state == "FAILED"
    assert "alert(1)" in status.incidents[0].cause
    html = status._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in html
    assert_harmless(html)
    assert "\x1b" not in str(status)


def test_a_plan_is_a_value_a_text_and_html(tmp_path: Path) -> None:
    root = Path(__file__).parents[3] / "examples"
    plan = ndctl.plan(
        root / "llama3-8b.yaml",
        set={"parallel.tp": 4},
        inventory=root / "inventories" / "h100.yaml",
    )
    assert (plan.mesh.tp, plan.world_size, len(plan.ranks)) == (4, 8, 8)
    assert plan.memory is not None
    assert plan.memory.device_bytes is not None
    assert plan.memory.peak_bytes < plan.memory.device_bytes
    assert plan.time is not None
    assert plan.time.mfu > 0
    assert str(plan).startswith("mesh ")
    assert_harmless(plan._repr_html_())
    assert list(tmp_path.iterdir()) == []

    own = {"name": "own", "run": {"program": "true"}, "cluster": {"gpus_per_host": 2}}
    assert ndctl.plan(own).memory is None
    assert ndctl.plan(own, set={"cluster.hosts": 2}).world_size == 4


def test_a_plan_says_what_the_job_takes() -> None:
    root = Path(__file__).parents[3] / "examples"
    spec, hosts = str(root / "llama3-8b.yaml"), str(root / "inventories/h100.yaml")
    found = ndctl.plan(spec, inventory=hosts, tokens=15e12, price=2.5)
    assert found.decision is not None
    assert found.decision.tokens == 15e12
    assert found.decision.tokens_from == "--tokens"
    hours, money = found.decision.gpu_hours, found.decision.money
    assert hours is not None
    assert money == pytest.approx(2.5 * hours)
    assert "money" in found.text
    with_failures, without = found.decision.with_failures_s, found.decision.training_s
    assert with_failures is not None
    assert with_failures > without
    typed = [spec, "--inventory", hosts, "--tokens=15e12", "--price=2.5", "--json"]
    answer = CliRunner().invoke(plan_command, typed)
    said = json.loads(answer.stdout)["decision"]
    assert said["money"] == money
    assert said.keys() == set(found.decision.__struct_fields__)
    for wrong in ({"tokens": 0}, {"tokens": float("nan")}, {"price": -1}, {"price": float("inf")}):
        with pytest.raises(ValueError, match="must be a"):
            ndctl.plan(spec, inventory=hosts, **wrong)


def test_hostile_text_in_a_plan_is_escaped(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    name = "<img src=x onerror=alert(1)>"
    hosts.write_text(f"hosts: [{{name: '{name}', devices: 8, profile: h100-sxm-80gb}}]\n")
    spec = Path(__file__).parents[3] / "examples" / "llama3-8b.yaml"
    plan = ndctl.plan(spec, inventory=hosts)
    assert plan.hosts == (name,)
    assert "&lt;img" in plan._repr_html_()
    assert_harmless(plan._repr_html_())


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[ndctl.Job]:
    job = ndctl.run(work(tmp_path, 600, "first"), name="growing", run_root=tmp_path)
    yield job
    if not job.status().ended:
        job.cancel()


def test_lines_are_followed_while_the_job_runs_until_it_ends(growing: ndctl.Job) -> None:
    lines = growing.logs(follow=True)
    assert "first" in next(lines).text  # the job runs for a minute
    assert not growing.status().ended
    growing.cancel()
    assert [line for line in lines if line.program == "rank"] == []


def test_following_can_be_left_at_any_line(growing: ndctl.Job) -> None:
    for line in growing.logs(rank=0, follow=True):
        assert "first" in line.text
        break
    assert not growing.status().ended
