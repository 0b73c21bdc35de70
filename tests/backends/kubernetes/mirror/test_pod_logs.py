"""Each line of the pods' logs is read once, even if streams break."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.mirror import pod_logs
from orchestrator.backends.kubernetes.mirror.pod_logs import PodLogs, Reading
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import Unanswered
from tests.agent.world import wait_for


def stamped(second: int, text: str, nanos: int = 0) -> bytes:
    return f"2026-01-01T00:00:{second:02}.{nanos:09}Z {text}".encode()


@dataclass
class Node:
    """A kubelet with the log lines of each pod. A test may break its streams."""

    lines: dict[str, list[bytes]]
    breaks_after: int | None = None
    asked: list[tuple[str, str | None, bool]] = field(default_factory=list)

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        follow: bool = False,
        since: str | None = None,
        quiet_s: float = 0.0,
    ) -> Iterator[bytes]:
        self.asked.append((pod, since, follow))
        begun = (since or "").removesuffix("Z").encode()
        for number, line in enumerate(one for one in list(self.lines[pod]) if one >= begun):
            if number == self.breaks_after:
                raise Unanswered("the connection broke")
            yield line


def a_pod(name: str, phase: str = "Running", node: str = "node-1") -> dict[str, object]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


RANK_0 = "[node-1 attempt 1 rank 0] "


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def logs_of(run_dir: RunDir, node: Node) -> PodLogs:
    return PodLogs(run_dir, node, "default", "pytorch")


def test_lines_go_to_the_files_of_their_ranks(run_dir: RunDir) -> None:
    said = ["starting", RANK_0 + "a b", "[node-1 attempt 2 torchrun] W", "ndctl-journal: {}"]
    node = Node({"one": [stamped(1, text) for text in said]})
    logs_of(run_dir, node).fetch([a_pod("one")])
    attempt = run_dir.attempt_logs(1, "node-1")
    assert (attempt / "rank-0.log").read_text() == "a b\n"
    assert (run_dir.attempt_logs(2, "node-1") / "torchrun.log").read_text() == "W\n"
    assert run_dir.agent_log("node-1").read_text() == "starting\n"


@pytest.mark.parametrize("breaks_after", [None, 0, 1, 2, 3, 4, 5])
def test_a_broken_stream_neither_loses_nor_doubles_a_line(
    run_dir: RunDir, breaks_after: int | None
) -> None:
    # Two lines have the same time, and two also the same text. The break may be between them.
    times = [(1, 0), (1, 5), (1, 5), (2, 0), (2, 7), (3, 0)]
    texts = ["a", "b", "b", "c", "d", "e"]
    lines = [stamped(s, RANK_0 + text, n) for (s, n), text in zip(times, texts, strict=True)]
    node = Node({"one": lines}, breaks_after)
    logs, pod = logs_of(run_dir, node), a_pod("one")
    missing = logs.fetch([pod])
    assert [one for one, _ in missing] == ([] if breaks_after is None else [pod])
    node.breaks_after = None
    assert logs.fetch([pod]) == []
    lines += [stamped(3, RANK_0 + "f"), stamped(4, RANK_0 + "g")]
    logs.fetch([pod])
    log = run_dir.attempt_logs(1, "node-1") / "rank-0.log"
    assert log.read_text().split() == [*texts, "f", "g"]
    assert node.asked[-1] == ("one", "2026-01-01T00:00:03Z", False)


def test_a_clock_set_back_loses_no_line_of_a_stream() -> None:
    reading = Reading()
    assert reading.begin() == ""
    lines = [stamped(9, "a"), stamped(3, "b"), stamped(4, "c")]
    assert [reading.take(line) for line in lines] == [b"a", b"b", b"c"]


def test_a_request_keeps_the_time_zone_of_the_node() -> None:
    reading = Reading()
    reading.take(b"2026-01-01T02:00:00.5+02:00 text")
    assert reading.begin() == "2026-01-01T02:00:00+02:00"


def test_a_limited_number_of_pods_is_followed_and_the_others_polled_in_turn(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "STREAMS", 2)
    monkeypatch.setattr(pod_logs, "IN_TURN", 1)
    pods = [a_pod(str(n), node=f"node-{n}") for n in range(4)]
    node = Node({str(n): [stamped(1, "x")] for n in range(4)})
    logs = logs_of(run_dir, node)
    logs.follow(pods)
    wait_for(lambda: not any(one.is_alive() for one in logs.streams.values()), "both streams")
    assert {pod for pod, _, follow in node.asked if follow} == {"0", "1"}
    logs.follow(pods[2:])
    wait_for(lambda: run_dir.agent_log("node-3").exists(), "the one that had to wait")
    assert run_dir.agent_log("node-2").read_text() == "x\n"


def test_an_ended_pod_is_read_to_its_end_once(run_dir: RunDir) -> None:
    node = Node({"one": [stamped(1, "Traceback"), stamped(1, "ModuleNotFoundError")]})
    logs = logs_of(run_dir, node)
    for _ in range(3):
        logs.follow([a_pod("one", "Failed")])
    assert len(node.asked) == 1
    said = run_dir.agent_log("node-1").read_text()
    assert said == "Traceback\nModuleNotFoundError\n"
