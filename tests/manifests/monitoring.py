"""Writes manifests/monitoring/prometheusrule.yaml: `python -m tests.manifests.monitoring`."""

from tests.manifests.examples import ROOT

FOLDER = ROOT / "manifests" / "monitoring"
HEAD = """\
# The groups of rules.yaml for the Prometheus Operator. From tests.manifests.monitoring.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ndctl
  labels: {app.kubernetes.io/part-of: ndctl}
spec:
"""


def operators_rules() -> str:
    text = (FOLDER / "rules.yaml").read_text()
    groups = text[text.index("groups:") :]
    return HEAD + "".join(f"  {line}\n" for line in groups.splitlines())


if __name__ == "__main__":
    (FOLDER / "prometheusrule.yaml").write_text(operators_rules())
