"""Ranks of the real trainer that hang because of a drill, and the evidence of their agents.

They are forked from a process that has imported torch, which saves seconds for each rank.
"""

import asyncio
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.agent.evidence.flight_recorder import Asking, gather_dumps
from orchestrator.agent.evidence.rank_evidence import gather_stacks, process_state, send_signal
from orchestrator.contract.files.env import STACKS_IN_C, RankEnv
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.messages.agent_protocol import Evidence
from orchestrator.contract.messages.events import EvidenceGathered, HangJudged, RankEvidence
from orchestrator.diagnosis.cause.hang_event import judgement
from orchestrator.diagnosis.dumps.group_names import axes_of
from orchestrator.diagnosis.hang.verdicts import RankFacts
from orchestrator.leader.hang_analysis import scene_of
from tests.trainer.launch.forked_ranks import FORKING
from tests.trainer.launch.tiny_runs import environments, tiny
from trainer.rank.environment import torch_defaults

EVIDENCE_S = 15.0
"""Limit for evidence. Ranks that can answer do so at once; a stopped rank uses all of it."""
PER_HOST = 2
BATCH = 8
"""Sequences of a step: each pipeline needs two micro-batches."""
OWN_FAULTS = "INJECTED"
"""Environment variable: JSON of what `_inject` does to this rank."""
STILL_S = 2.0
WAIT_S = 240.0


def judge_hang(folder: Path, mesh: Mesh, drill: Mapping[str, Any], **changes: Any) -> HangJudged:
    """The analysis of a hang of ranks, two on each host. One of them has the fault `drill`."""
    traces = folder / "traces"
    traces.mkdir()
    path, log = folder / "trainer.json", folder / "ranks.log"
    axes = dict(zip(AXES, mesh.degrees, strict=True))
    changes = {"steps": 50, "global_batch_size": BATCH, "parallel": axes, **changes}
    path.write_text(json.dumps(tiny(folder / "run", **changes)))
    env = {
        "NDCTL_ATTEMPT": "1",
        "NDCTL_TRACE_DIR": str(traces),
        "NDCTL_DRILLS": json.dumps([{"id": 1, "target": "rank", **drill}]),
    }
    with forked(environments(mesh.world_size, env), path, [log] * mesh.world_size) as ranks:
        pids = pids_of(ranks)
        _wait_until_still(pids, drill["index"], log)
        return _judge(mesh, pids, traces)


@contextmanager
def forked(
    envs: Sequence[dict[str, str]], path: Path, logs: Sequence[Path]
) -> Iterator[list[BaseProcess]]:
    """The ranks, one for each of `envs`; none is left afterwards."""
    for log in logs:
        log.write_text("")
    ranks: list[BaseProcess] = [
        FORKING.Process(target=_train, args=(env, str(path), str(log)), daemon=True)
        for env, log in zip(envs, logs, strict=True)
    ]
    try:
        for rank in ranks:
            rank.start()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def pids_of(ranks: Sequence[BaseProcess]) -> dict[int, int]:
    return {number: int(rank.pid or 0) for number, rank in enumerate(ranks)}


def _train(env: dict[str, str], path: str, log: str) -> None:
    os.environ.clear()
    rank = RankEnv.from_mapping(env)
    os.environ.update({**torch_defaults(rank), **env})
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())
    from trainer.process import start

    if faults := env.get(OWN_FAULTS):
        _inject(json.loads(faults))
    os._exit(start([path], rank))


def _inject(faults: Mapping[str, float]) -> None:
    """Faults that no drill has. `larger`: at this step the totals have twice the size;
    `forward`: each forward pass takes this many seconds longer."""
    if "larger" in faults:
        _call_too_much(int(faults["larger"]))
    if "forward" in faults:
        _pass_slowly(faults["forward"])


def _call_too_much(step: int) -> None:
    dist: Any = importlib.import_module("torch.distributed")
    original, steps = dist.all_reduce, itertools.count(1)

    def reduce_larger(tensor: Any, *more: Any, **how: Any) -> Any:
        totals = not (more or how)  # calls with arguments reduce gradients
        again = totals and next(steps) == step
        return original(tensor.repeat(2) if again else tensor, *more, **how)

    dist.all_reduce = reduce_larger


def _pass_slowly(seconds: float) -> None:
    decoder: Any = importlib.import_module("trainer.model.decoder").Decoder
    original = decoder.forward

    def forward_slowly(*values: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return original(*values, **more)

    decoder.forward = forward_slowly


def _wait_until_still(pids: Mapping[int, int], culprit: int, log: Path) -> None:
    """Wait until all ranks but the culprit have used no processor for STILL_S."""
    until = time.monotonic() + WAIT_S
    peers = [pid for rank, pid in pids.items() if rank != culprit]
    before: list[int] | None = None
    since = 0.0
    while time.monotonic() < until:
        time.sleep(0.1)
        states = {process_state(pid) for pid in pids.values()}
        assert not states & {"Z", "gone"}, log.read_text()
        drilled = "drill" in log.read_text()
        now = [work for pid in peers if (work := _work(pid)) is not None]
        if not drilled or len(now) < len(peers) or now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > STILL_S:
            return
    raise AssertionError(f"ranks still worked after {WAIT_S:.0f} s:\n{log.read_text()}")


def _work(pid: int) -> int | None:
    """How often the main thread of a process was scheduled; None while it is runnable."""
    if process_state(pid) == "R":
        return None
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[2])


def _judge(mesh: Mesh, pids: Mapping[int, int], traces: Path) -> HangJudged:
    """Gather evidence as agents do, and analyse it as the leader does."""
    hosts = {rank: f"host-{rank // PER_HOST}" for rank in pids}
    parts = [
        asyncio.run(
            _gather({r: pid for r, pid in pids.items() if hosts[r] == host}, host, mesh, traces)
        )
        for host in sorted(set(hosts.values()))
    ]
    scene, lost = scene_of(parts)
    facts = {
        rank: replace(scene.facts.get(rank, RankFacts(rank=rank)), host=hosts[rank])
        for rank in hosts
    }
    scene = replace(scene, facts=facts, world=mesh.world_size, axes=axes_of(mesh))
    return judgement(scene, at=0.0, attempt=1, missing=lost)


async def _gather(pids: Mapping[int, int], host: str, mesh: Mesh, traces: Path) -> Evidence:
    def urge(ranks: Iterable[int]) -> None:
        for rank in ranks:
            send_signal(pids[rank], STACKS_IN_C)

    asking = Asking(
        traces=traces, socket=traces / "no-agent.sock", attempt=1, world=mesh.world_size
    )
    stacks, dumps = await asyncio.gather(
        gather_stacks(pids.items(), traces, EVIDENCE_S, urge=urge),
        gather_dumps(pids, {}, asking, EVIDENCE_S),
    )
    event = EvidenceGathered(
        attempt=1,
        host=host,
        ranks=tuple(
            RankEvidence(
                rank=rank,
                pid=pid,
                process_state=process_state(pid),
                step=0,
                phase="train",
                age_s=0.0,
                stack=stacks.get(rank, ()),
            )
            for rank, pid in pids.items()
        ),
        dumps=len(dumps.reduced),
        withheld=dumps.withheld,
        missing={f"dump of rank {rank}": why for rank, why in dumps.missing.items()},
    )
    return Evidence(event=event, dumps={str(rank): text for rank, text in dumps.reduced.items()})
