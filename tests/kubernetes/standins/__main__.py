"""Runs all stand-ins of one control plane in one process.

`python -m tests.kubernetes.standins DIR '{"nodes": 4}' [KIND...]`; each KIND has its real operator
and needs no stand-in. Tests send orders over a Unix socket, one line of JSON each.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from tests.kubernetes.standins import nodes
from tests.kubernetes.standins.api import Api, Object, path
from tests.kubernetes.standins.jobset import JobSets
from tests.kubernetes.standins.kubelet import Kubelet
from tests.kubernetes.standins.kubelet_server import serve
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.standins.operator import Controller, Operator
from tests.kubernetes.standins.pytorchjob import PyTorchJobs
from tests.kubernetes.standins.trainjob import TORCH, TrainJobs

REPOSITORY = Path(__file__).parents[3]


async def run(folder: Path, shape: Shape, real_kinds: Collection[str] = ()) -> None:
    """Runs until SIGTERM. `real_kinds` are kinds of jobs that need no stand-in."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Api.of_kubeconfig(folder / "kubeconfig") as api:
        kubelet = Kubelet(api, shape, folder, _image(api.server))
        addresses = [nodes.address(shape, number + 1) for number in range(shape.nodes)]
        server = await serve(kubelet, addresses, folder / "pki")
        controllers: dict[str, Controller] = {
            "PyTorchJob": PyTorchJobs(api),
            "JobSet": JobSets(api),
            "TrainJob": TrainJobs(api),
        }
        controllers = {kind: it for kind, it in controllers.items() if kind not in real_kinds}
        operator = Operator(api, controllers)
        await api.create(path("clustertrainingruntimes"), TORCH)
        orders = await asyncio.start_unix_server(
            lambda *streams: _handle_order(kubelet, stop, *streams),
            folder / "run" / "standins.sock",
        )
        work = [asyncio.create_task(it.run()) for it in (kubelet, operator)]
        waits = asyncio.create_task(stop.wait())
        await asyncio.wait([waits, *work], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            task.cancel()
        await kubelet.close()
        await server.cleanup()
        orders.close()
        for task in work:
            if task.done() and not task.cancelled():
                task.result()  # Raises the error that ended the task.


def _image(server: str) -> dict[str, str]:
    """Environment of every container, as if ndctl's image set it."""
    host, _, port = server.rpartition("/")[2].partition(":")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    inside = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    # The container's python3 is this one, so it has the same packages.
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": programs, "PYTHONPATH": str(REPOSITORY), **inside}


async def _handle_order(
    kubelet: Kubelet,
    stop: asyncio.Event,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    asked = json.loads(await reader.readline())
    if asked == {"order": "end"}:
        stop.set()
        return  # The connection stays open until this process ends.
    try:
        answer: Object = {"result": await _execute_order(kubelet, **asked)}
    except (KeyError, TypeError, ValueError) as exc:
        answer = {"error": repr(exc)}
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()
    writer.close()


async def _execute_order(kubelet: Kubelet, order: str, **what: str) -> object:
    match order:
        case "lose-node":
            await kubelet.lose_node(what["node"], processes_live=what.get("processes") == "live")
            return None
        case "node-back":
            await kubelet.restore_node(what["node"])
            return None
        case "lost":
            return sorted(kubelet.lost)
        case "block-image-pulls":
            kubelet.nodes_without_images.clear()
            kubelet.nodes_without_images.update(filter(None, what["nodes"].split(",")))
            return None
    run = kubelet.run_of(what["pod"])
    if run is None:
        raise ValueError(f"no pod {what['pod']} on a reachable node")
    match order:
        case "pids":
            return [pid for each in run.containers.values() for pid in each.pids()]
        case "oom":
            for name, container in run.containers.items():
                run.oom_killed.add(name)
                container.signal(9)
        case "evict":
            await run.evict(what.get("message", "The node was low on resource: memory."))
        case _:
            raise ValueError(f"no order {order}")
    return None


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])), sys.argv[3:]))
