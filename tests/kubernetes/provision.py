"""A pytest plugin that provides the control plane's binaries.

`manifests/testbed/kube_envtest.sh` builds them once into a cache outside the checkout, which takes
minutes. The build therefore starts when tests on Kubernetes are collected, while other tests run;
`make test` starts it even before packages are installed, and then this one waits for that.
`KUBEBUILDER_ASSETS` names a directory with other binaries.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.seams import Completed
from tests.kubernetes import real_operators
from tests.kubernetes.standins.containers import why_no_containers
from tests.testbeds import run_within, say_what_was_not_run

SCRIPT = Path(__file__).parents[2] / "manifests" / "testbed" / "kube_envtest.sh"
NOT_RUN = "NOT TESTED ON KUBERNETES: "
BUILD_S = 1500
PATIENCE_S = 600
"""Default time limit of a test: on a busy machine a cluster takes minutes to start."""
_build: "list[subprocess.Popen[bytes]]" = []
"""The build in the background, if this process started one."""


def assets() -> Path:
    return Path(_where().out.strip())


def _where() -> Completed:
    return run_within([str(SCRIPT), "where"], os.environ, 30)


def why_no_control_plane() -> str | None:
    """None if a control plane can be started. Waits for the build if one is needed."""
    if (why := why_no_containers()) is not None:
        return why
    try:
        done = run_within([str(SCRIPT)], os.environ, BUILD_S)
    except TimeoutError as exc:
        return f"building the control plane: {exc}"
    return None if done.code == 0 else " ".join(done.err.split())[-300:] or f"code {done.code}"


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups afterwards.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts all tests on Kubernetes into one worker, because they share a cluster."""
    ours = [item for item in items if item.get_closest_marker("kubernetes") is not None]
    for item in ours:
        item.add_marker(pytest.mark.xdist_group("kubernetes"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENCE_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    ours = [it for it in session.items if it.get_closest_marker("kubernetes") is not None]
    if not ours or session.config.option.collectonly or _where().code == 0:
        return
    for item in ours:
        # Any of them may be the first, which waits for the build.
        own = item.get_closest_marker("timeout")
        longest = BUILD_S + (own.args[0] if own else PATIENCE_S)
        item.add_marker(pytest.mark.timeout(longest), append=False)
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _build.append(
            subprocess.Popen(
                ["nice", str(SCRIPT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )


def pytest_sessionfinish() -> None:
    """Ends a build that still runs; the next run continues it."""
    for build in _build:
        if build.poll() is None:
            os.killpg(build.pid, signal.SIGTERM)
        build.wait()


def pytest_report_header() -> str | None:
    """The version of Kubernetes, if it is not the one that we build."""
    if "KUBEBUILDER_ASSETS" not in os.environ or _where().code != 0:
        return None
    output = run_within([str(assets() / "kube-apiserver"), "--version"], os.environ, 30)
    return f"kubernetes: {output.out.strip()}, from KUBEBUILDER_ASSETS"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    remedy = (
        "be root on Debian 12 with access to its package archive, or set KUBEBUILDER_ASSETS to a"
        " directory with etcd, kubectl and kube-apiserver, -controller-manager and -scheduler."
    )
    say_what_was_not_run(terminalreporter, NOT_RUN, "Kubernetes", remedy)
    remedy = "set KUBE_OPERATORS to a directory with their binaries (manifests/testbed/README.md)."
    say_what_was_not_run(terminalreporter, real_operators.NOT_RUN, "operator", remedy)
