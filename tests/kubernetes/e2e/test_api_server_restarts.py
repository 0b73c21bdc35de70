"""Watches, a dashboard and commands while the API server is stopped and loses its history."""

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS
from orchestrator.contract.files import exit_codes
from orchestrator.system import SystemClock
from tests.e2e.job import ROOT, wait_for
from tests.kubernetes.e2e.person import NO_IMAGE, Person, account
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]
LABEL = "watched=yes"
LIMIT_S = 300.0


def watching(kube: KubeTestbed) -> ListWatch:
    api = Api(None, {"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    return ListWatch(api=api, resource=CONFIG_MAPS, namespace="default", labels=LABEL)


def create(kube: KubeTestbed, name: str) -> None:
    metadata = {"name": name, "labels": {"watched": "yes"}}
    kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


class Seen:
    """Collects the changes of a watch in a thread."""

    def __init__(self, one: ListWatch) -> None:
        self.names: list[set[str]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, args=(one,), daemon=True)
        self.thread.start()

    def _follow(self, one: ListWatch) -> None:
        for cache in one.changes(one.api.clock.monotonic() + LIMIT_S):
            self.names.append({name for _, name in cache.items})
            if self.over.is_set():
                return

    def wait_until(self, names: set[str]) -> None:
        wait_for(lambda: self.names[-1:] == [names], f"{names} in {self.names}", LIMIT_S)


def ends(seen: Seen, kube: KubeTestbed, last: str) -> None:
    """Ends the thread, which stops at the next change: the creation of `last`."""
    seen.over.set()
    create(kube, last)
    seen.thread.join(LIMIT_S)
    assert not seen.thread.is_alive()


@pytest.fixture
def follower(kube: KubeTestbed, tmp_path: Path) -> Person:
    account(kube)
    person = Person(tmp_path / "runs", kube)
    person.submit_successfully(image=NO_IMAGE)
    return person


class Dashboard:
    """`ndctl dashboard` on its own terminal; without a terminal it draws once and exits."""

    def __init__(self, person: Person, screen: Path) -> None:
        words = (sys.executable, "-m", "orchestrator", "dashboard", "e2e", "--backend=kubernetes")
        self.screen, self.seen = screen, 0
        self.process = subprocess.Popen(
            ["script", "-qefc", shlex.join([*words, "-n", "default"]), str(screen)],
            env={**person.environ, "TERM": "xterm"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def shows(self, words: str) -> None:
        """Waits for `words` after the position of the last match."""
        wait_for(lambda: words in self._news(), f"{words!r} after {self._news()!r}", LIMIT_S)
        self.seen += self._news().index(words) + len(words)
        assert self.process.poll() is None

    def _news(self) -> str:
        drawn = self.screen.read_text(errors="replace") if self.screen.exists() else ""
        return drawn[self.seen :]


@pytest.fixture
def dashboard(kube: KubeTestbed, follower: Person, tmp_path: Path) -> Iterator[Dashboard]:
    shown = Dashboard(Person(tmp_path / "other", kube), tmp_path / "screen")
    yield shown
    shown.process.terminate()
    shown.process.communicate(timeout=60)


def test_watches_and_followers_survive_a_restart_and_a_compaction(
    kube: KubeTestbed, follower: Person, dashboard: Dashboard, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        create(kube, name)
    live, late = watching(kube), watching(kube)
    seen = Seen(live)
    seen.wait_until({"a", "b"})
    for cache in late.changes(late.api.clock.monotonic() + LIMIT_S):
        assert {name for _, name in cache.items} == {"a", "b"}
        break
    kube.kubectl("delete", "configmap", "b")
    seen.wait_until({"a"})
    follows = follower.at("default").start("submit", *follower.words(image=NO_IMAGE), "--follow")
    assert follows.wait(300) == exit_codes.BAD_JOB_STATE, "the job exists already"
    follows.communicate()
    dashboard.shows("pods run")

    kube.stop_control_plane()
    refused = Person(tmp_path / "third", kube).submit(image=NO_IMAGE)
    assert refused.code == exit_codes.BACKEND, refused.out + refused.err
    assert re.search("the API server of .* is unreachable", refused.err)
    assert not (tmp_path / "third").exists()
    shown = follower("status", "e2e")
    assert shown.code == 0
    assert re.search(r"SUBMITTED as of .* is unreachable: Connection refused", shown.out)
    dashboard.shows("unreachable")
    kube.start_control_plane()

    create(kube, "c")
    kube.compact()
    seen.wait_until({"a", "c"})
    relisted = Seen(late)
    relisted.wait_until({"a", "c"})
    assert {"a", "b", "c"} not in relisted.names, "an object that was deleted meanwhile is gone"
    ends(seen, kube, "last")
    ends(relisted, kube, "very-last")
    dashboard.shows("pods run")
    cancelled = follower("cancel", "e2e")
    assert cancelled.code == 0, cancelled.err
