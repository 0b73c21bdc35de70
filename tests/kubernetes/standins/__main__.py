"""The stand-ins of one control plane in one process, and what tests ask of them, a line of JSON
each over a socket: `python -m tests.kubernetes.standins DIR '{"nodes": 4}' [KIND...]`; KINDs are
those whose own operator runs."""

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


async def run(folder: Path, shape: Shape, others: Collection[str] = ()) -> None:
    """Until SIGTERM."""
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
        controllers = {kind: it for kind, it in controllers.items() if kind not in others}
        operator = Operator(api, controllers)
        await api.create(path("clustertrainingruntimes"), TORCH)
        orders = await asyncio.start_unix_server(
            lambda *streams: _obey(kubelet, stop, *streams), folder / "run" / "standins.sock"
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
                task.result()  # raises what ended it


def _image(server: str) -> dict[str, str]:
    """Environment of every container, as if ndctl's image brought it along."""
    host, _, port = server.rpartition("/")[2].partition(":")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    inside = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    programs = f"{Path(sys.executable).parent}:{kept['PATH']}"  # its python3 has all that we have
    return {**kept, "PATH": programs, "PYTHONPATH": str(REPOSITORY), **inside}


async def _obey(
    kubelet: Kubelet,
    stop: asyncio.Event,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    asked = json.loads(await reader.readline())
    if asked == {"order": "end"}:
        stop.set()
        return  # the line stays open until this process ends
    try:
        said: Object = {"said": await _order(kubelet, **asked)}
    except (KeyError, TypeError, ValueError) as exc:
        said = {"error": repr(exc)}
    writer.write(json.dumps(said).encode() + b"\n")
    await writer.drain()
    writer.close()


async def _order(kubelet: Kubelet, order: str, **what: str) -> object:
    match order:
        case "lose-node":
            await kubelet.lose(what["node"], processes_live=what.get("processes") == "live")
            return None
        case "node-back":
            await kubelet.back(what["node"])
            return None
        case "lost":
            return sorted(kubelet.lost)
        case "imageless":
            kubelet.imageless.clear()
            kubelet.imageless.update(filter(None, what["nodes"].split(",")))
            return None
    run = kubelet.run_of(what["pod"])
    if run is None:
        raise ValueError(f"no pod {what['pod']} on a node that answers")
    match order:
        case "pids":
            return [pid for each in run.containers.values() for pid in each.pids()]
        case "oom":
            for name, container in run.containers.items():
                run.oom.add(name)
                container.signal(9)
        case "evict":
            await run.evict(what.get("message", "The node was low on resource: memory."))
        case _:
            raise ValueError(f"no order {order}")
    return None


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])), sys.argv[3:]))
