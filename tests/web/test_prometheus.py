"""A real Prometheus scrapes the server and evaluates the rules, and an alert fires."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.journal.journal import Entry, read, to_line
from orchestrator.system import SystemClock
from orchestrator.web.access import Access
from orchestrator.web.fleet import Fleet, Place
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.server import Listening, Looker, application, serving
from tests.dashboard.dashboard_story import broken, finished, started
from tests.manifests.monitoring import FOLDER
from tests.manifests.test_monitoring import dashboard
from tests.web.served_jobs import HOSTILE, patient, written

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
TOKEN = "s3cret"
LIMIT_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="Prometheus is not installed: apt-get install prometheus",
    ),
]

CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: ndctl
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def told(*argv: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(argv, input=text, capture_output=True, timeout=LIMIT_S, check=False)


def test_promtool_accepts_the_rules_and_the_metrics(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    checked = told(PROMTOOL, "check", "rules", str(FOLDER / "rules.yaml"))
    assert checked.returncode == 0, checked.stderr
    run_dir = written(tmp_path / HOSTILE.replace("/", ""), finished(), range(1, 30))
    state = patient(Fleet(lambda: [Place(run_dir=run_dir)], SystemClock())).look()
    checked = told(PROMTOOL, "check", "metrics", text=Exposition().text(state, "")[0])
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.parametrize(("state", "fires"), [("RUNNING", True), ("FAILED", False)])
def test_the_last_restart_is_an_alert_only_while_the_job_runs(
    tmp_path: Path, state: str, fires: bool
) -> None:
    assert PROMTOOL is not None
    labels = {"job_name": "a", "run_root": "/runs"}
    name = ", ".join(f'{key}="{value}"' for key, value in labels.items())
    figures = {f"ndctl_restarts_{one}{{{name}}}": "1" for one in ("allowed", "without_checkpoint")}
    for one in ("RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"):
        figures[f'ndctl_job_state{{{name}, state="{one}"}}'] = str(int(one == state))
    said = {
        "summary": "a fails with the next incident",
        "description": "All restarts without a new checkpoint are used up. A checkpoint gives them"
        " back.",
    }
    alert = {"exp_labels": {**labels, "severity": "critical"}, "exp_annotations": said}
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in figures.items()],
        "alert_rule_test": [
            {
                "eval_time": "0m",
                "alertname": "NdctlRestartsNearlyUsedUp",
                "exp_alerts": [alert] if fires else [],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(FOLDER / "rules.yaml")], "tests": [test]}))
    checked = told(PROMTOOL, "test", "rules", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@contextlib.contextmanager
def prometheus(folder: Path, port: int) -> Iterator[str]:
    """The address of a Prometheus that scrapes this port."""
    assert PROMETHEUS is not None
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=FOLDER / "rules.yaml", token=TOKEN, port=port))
    listen = f"127.0.0.1:{port + 1 if port < 65000 else port - 1}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={listen}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://{listen}/api/v1"
        finally:
            process.terminate()
            process.wait(30)


async def get(session: aiohttp.ClientSession, path: str, **query: str) -> Any:
    async with session.get(f"{path}?{urlencode(query)}" if query else path) as said:
        return json.loads(await said.text())


async def until(session: aiohttp.ClientSession, path: str, key: str) -> list[Any]:
    """The list that this answer has at `key`, once it is not empty."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        # Until it is ready, Prometheus answers with text.
        with contextlib.suppress(aiohttp.ClientError, json.JSONDecodeError):
            found = (await get(session, path))["data"][key]
            if found:
                return list(found)
        await asyncio.sleep(0.2)
    raise AssertionError(f"no {key} at {path}")


ABSENT = {
    *("MFU", "Ranks that are not ok", "Struck hosts"),
    # From the leader alone.
    *("Heartbeat age of ranks", "Own work per step of ranks"),
}
"""Panels without data for the jobs here: no known device, no rank in trouble, no strike."""


def concrete(expression: str) -> str:
    """A query of the dashboard, for all jobs."""
    for variable, value in (("$job", ".*"), ("$run_root", ".*"), ("$__rate_interval", "1m")):
        expression = expression.replace(variable, value)
    return expression


def test_a_failed_job_fires_its_alert(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    jobs = [
        written(runs / "lost", broken(), range(1, 20)),
        written(runs / "done", finished(), range(1, 60)),
        written(runs / HOSTILE.replace("/", ""), started()),
    ]
    # The state of the lost job is that its leader died, now.
    clock = SystemClock()
    move_to(jobs, clock.now())

    async def run() -> None:
        fleet = patient(Fleet(lambda: [Place(run_dir=one) for one in jobs], clock))
        app = application(Looker(fleet.look), Access(token=TOKEN), Exposition())
        async with serving(app, Listening()) as port, aiohttp.ClientSession() as session:
            with prometheus(tmp_path, port) as api:
                alerts = await until(session, f"{api}/alerts", "alerts")
                firing = {
                    (one["labels"]["alertname"], one["labels"].get("job_name"))
                    for one in alerts
                    if one["state"] == "firing"
                }
                assert ("NdctlJobFailed", "lost") in firing
                assert ("NdctlJobFailed", "done") not in firing
                groups = await until(session, f"{api}/rules", "groups")
                wrong = [one["lastError"] for one in groups[0]["rules"] if one.get("lastError")]
                assert wrong == []
                types = (await get(session, f"{api}/metadata"))["data"]
                assert types["ndctl_lost_seconds"][0]["type"] == "counter"
                for panel in dashboard()["panels"]:
                    for target in panel["targets"]:
                        query = urlencode({"query": concrete(target["expr"])})
                        if panel["title"] in ABSENT:
                            answer = await get(session, f"{api}/query?{query}")
                            assert answer["status"] == "success", (query, answer)
                        else:
                            await until(session, f"{api}/query?{query}", "result")
                # A counter whose first value is 1 has no increase, but the panel counts it.
                (title,) = [p for p in dashboard()["panels"] if p["title"].startswith("Incidents")]
                counted = concrete(title["targets"][0]["expr"])
                answer = await get(session, f"{api}/query", query=counted)
                assert answer["data"]["result"][0]["value"][1] == "1"
                steps = await get(session, f"{api}/query", query="ndctl_step")
                names = {one["metric"]["job_name"] for one in steps["data"]["result"]}
                assert len(names) == 3

    asyncio.run(run())


def move_to(jobs: list[RunDir], now: float) -> None:
    """Shifts the journals so that their last event is 10 s ago."""
    for run_dir in jobs:
        entries = read(run_dir.journal)
        by = now - 10 - max(entry.event.at for entry in entries)
        moved = [
            Entry(seq=e.seq, event=replace(e.event, at=e.event.at + by), actions=e.actions)
            for e in entries
        ]
        run_dir.journal.write_bytes(b"".join(map(to_line, moved)))
