"""Where the control plane's binaries come from."""

import os
from pathlib import Path

NOT_RUN = "NOT TESTED ON KUBERNETES: "


def assets() -> Path:
    return Path(os.environ.get("KUBEBUILDER_ASSETS", "/opt/kube-envtest"))


def why_not() -> str | None:
    return None
