"""A collector of OpenTelemetry hears of a job in two allocations."""

import json
from pathlib import Path

import pytest

from tests.e2e.job import wait_for
from tests.notify.collector import attributes_of, collecting
from tests.slurm.e2e.slurm_job import SlurmNdctl

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(400)]
PROGRAM = """#!/bin/sh
case $NDCTL_ATTEMPT in
1) exit 7 ;;
2) exec sleep 600 ;;
esac
"""


# In every run tests/notify/test_spans.py has the export.
@pytest.mark.slow
def test_both_leaders_of_a_requeued_job_export_to_one_trace(
    ndctl: SlurmNdctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm passes the variables of `ndctl submit` to both leaders. Attempt 1 fails, Slurm requeues
    the job in attempt 2, and attempt 3 succeeds."""
    program = tmp_path / "program.sh"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    run = {"program": str(program)}
    cluster = {"backend": "slurm", "hosts": 2, "gpus_per_host": 1}
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({"name": "e2e", "run": run, "cluster": cluster}))
    with collecting(address=ndctl.testbed.address) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        done = ndctl("submit", str(spec))
        assert done.code == 0, done.out + done.err
        wait_for(lambda: "attempt 1" in collector.names, "the span of attempt 1")
        wait_for(lambda: ndctl.status()["attempt"] == 2, "attempt 2")
        ndctl.testbed.output_of("scontrol", "requeue", ndctl.job_id)
        ndctl.wait_for_end()
        assert ndctl.status()["state"] == "SUCCEEDED"
        wait_for(lambda: "job e2e" in collector.names, "the span of the job")
    job = collector.named("job e2e")
    assert attributes_of(job)["backend"] == "slurm"
    assert {span.trace_id for span in collector.spans} == {job.trace_id}
    ids = {(span.name, span.span_id) for span in collector.spans if "attempt" in span.name}
    assert sorted(name for name, _ in ids) == ["attempt 1", "attempt 2", "attempt 3"]
