"""Profiles that an agent asks for while a rank trains."""

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.profile_request import (
    ProfileRequest,
    request_path,
    take_request,
    write_request,
)
from orchestrator.contract.messages.rank_messages import Beat, Profiled, from_bytes
from trainer.measure.profiling import Profiling
from trainer.rank.reporter import Reporter

CPU = torch.device("cpu")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(tmp_path / "s"))
        agent.setblocking(False)
        yield agent


def env_in(folder: Path) -> RankEnv:
    return RankEnv(rank=3, attempt=2, heartbeat_socket=str(folder / "s"))


@contextmanager
def opened(folder: Path, env: RankEnv) -> Iterator[Profiling]:
    with closing(Reporter(env)) as reporter:
        yield Profiling(None, folder, CPU, reporter)


def train(profiling: Profiling, steps: range) -> None:
    weight = torch.zeros(8, requires_grad=True)
    for step in steps:
        profiling.before(step)
        weight.exp().sum().backward()
        profiling.after(step)


def heard(agent: socket.socket) -> list[Beat | Profiled]:
    found: list[Beat | Profiled] = []
    while True:
        try:
            datagram = from_bytes(agent.recv(1 << 16))
        except BlockingIOError:
            return found
        assert isinstance(datagram, Beat | Profiled)
        found.append(datagram)


def test_a_rank_records_the_steps_that_it_was_asked_for(
    tmp_path: Path, agent: socket.socket
) -> None:
    env, out = env_in(tmp_path), tmp_path / "profiles"
    with opened(out, env) as profiling:
        train(profiling, range(1, 4))
        assert heard(agent) == []
        write_request(request_path(env), ProfileRequest(id="a", steps=2))
        train(profiling, range(4, 9))
    *beats, answer = heard(agent)
    assert isinstance(answer, Profiled)
    trace = out / "rank-3.step-4.trace.json.gz"
    assert (answer.request, answer.first_step, answer.files) == ("a", 4, (str(trace),))
    assert [beat.phase for beat in beats if isinstance(beat, Beat)] == ["profile", "write", "train"]
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::exp" for event in events) == 2
    assert [path.name for path in out.iterdir()] == [trace.name], "asked once, recorded once"


def test_a_request_waits_for_the_profile_that_is_being_recorded(
    tmp_path: Path, agent: socket.socket
) -> None:
    env, out = env_in(tmp_path), tmp_path / "profiles"
    with opened(out, env) as profiling:
        write_request(request_path(env), ProfileRequest(id="a", steps=2))
        train(profiling, range(1, 2))
        write_request(request_path(env), ProfileRequest(id="b", steps=1))
        train(profiling, range(2, 5))
    answers = [one for one in heard(agent) if isinstance(one, Profiled)]
    assert [(one.request, one.first_step) for one in answers] == [("a", 1), ("b", 3)]


def test_a_profile_that_cannot_be_written_is_reported(tmp_path: Path, agent: socket.socket) -> None:
    env = env_in(tmp_path)
    (tmp_path / "file").touch()
    write_request(request_path(env), ProfileRequest(id="a", steps=1))
    with opened(tmp_path / "file", env) as profiling:
        train(profiling, range(1, 2))
    answer = heard(agent)[-1]
    assert isinstance(answer, Profiled)
    assert answer.files == ()
    assert answer.why.startswith("failed to write the profile: ")


@pytest.mark.parametrize("text", ["", "{", '{"id": "a", "steps": 0}', "[]"])
def test_a_request_that_cannot_be_read_is_removed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "request"
    path.write_text(text)
    assert take_request(path) is None
    assert not path.exists()


def test_without_an_agent_there_is_no_request(tmp_path: Path) -> None:
    with opened(tmp_path / "profiles", RankEnv()) as profiling:
        train(profiling, range(1, 3))
    assert not (tmp_path / "profiles").exists()


def test_a_profiler_that_cannot_start_does_not_end_the_training(
    tmp_path: Path, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: profile) -> None:
        raise RuntimeError("another profiler is active")

    monkeypatch.setattr(profile, "start", fail)
    env = env_in(tmp_path)
    with opened(tmp_path / "profiles", env) as profiling:
        write_request(request_path(env), ProfileRequest(id="a", steps=2))
        train(profiling, range(1, 4))
    *beats, answer = heard(agent)
    assert isinstance(answer, Profiled)
    assert answer.files == ()
    assert answer.why == "failed to start the profile: another profiler is active"
    assert [beat.phase for beat in beats if isinstance(beat, Beat)] == ["profile", "train"]
