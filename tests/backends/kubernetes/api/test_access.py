"""Every kubeconfig that cannot be used is an error with a fix, never a traceback."""

from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.errors import BackendError

CONTEXT = "{name: a, context: {cluster: c, user: u, namespace: team}}"
GOOD = f"""
contexts: [{CONTEXT}]
current-context: a
clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:9"}}}}]
users: [{{name: u, user: {{}}}}]
"""


def access(tmp_path: Path, text: str, wanted: str | None = None) -> Access:
    file = tmp_path / "kubeconfig"
    file.write_bytes(text.encode("latin-1"))
    return Access(wanted, {"KUBECONFIG": str(file)})


@pytest.mark.parametrize(
    "text",
    [
        "foo: [bar\n",
        "- a\n",
        "hello",
        "\xff\xfe",
        GOOD.replace("contexts: [", "contexts: 5 #"),
        GOOD.replace("{cluster: c, user: u, namespace: team}", "5"),
        GOOD.replace("user: {}", 'user: {client-key-data: "A"}'),
    ],
)
def test_a_malformed_kubeconfig_is_told_with_a_fix(tmp_path: Path, text: str) -> None:
    broken = access(tmp_path, text)
    with pytest.raises(BackendError, match=r"kubeconfig|Kubernetes cluster") as told:
        _ = broken.namespace, broken.server
    assert "KUBECONFIG" in told.value.fix
    assert "\n" not in told.value.message


def test_an_unreadable_or_missing_kubeconfig_is_no_cluster(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BackendError, match=f"cannot find a Kubernetes cluster in {file}: "):
            _ = Access(None, {"KUBECONFIG": str(file)}).namespace


def test_the_contexts_of_a_kubeconfig_are_found(tmp_path: Path) -> None:
    assert access(tmp_path, GOOD).namespace == "team"
    assert access(tmp_path, GOOD).context == "a"
    with pytest.raises(BackendError, match="has no context b; there are: a"):
        _ = access(tmp_path, GOOD, "b").context


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("{command: no-such-plugin, installHint: get it at x}", "No such file or directory"),
        ('{command: sh, args: [-c, "echo session ended >&2; exit 1"]}', "session ended"),
        ("{command: echo}", "failed to decode"),
    ],
)
def test_a_login_plugin_that_fails_is_named_and_nothing_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], plugin: str, reason: str
) -> None:
    """The client logs the error and goes on without credentials."""
    told = plugin.replace("{", "{apiVersion: client.authentication.k8s.io/v1, ")
    text = GOOD.replace("user: {}", f"user: {{exec: {told}}}")
    with pytest.raises(
        BackendError, match=rf"the login plugin .* of user u failed: .*{reason}"
    ) as e:
        _ = access(tmp_path, text).config
    assert "log in to the cluster again" in e.value.fix
    assert ("install it (get it at x)" in e.value.fix) == ("installHint" in plugin)
    assert capfd.readouterr() == ("", "")
