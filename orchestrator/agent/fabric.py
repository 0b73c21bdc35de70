"""This host's part in the small all-reduce of all hosts: a child that dies with the agent."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping

from orchestrator.agent.torchrun import KEEPER, HostPlace
from orchestrator.contract import env
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.protocol import Checked, CheckFabric
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

MARGIN_S = 1.0
"""Before the order's limit, for the child's own verdict to come; after it the child is killed."""
REAP_S = 0.5
TAIL = 300


def render(order: CheckFabric, place: HostPlace, until: float) -> list[str]:
    """The child's command line; it gives up at `until` of the monotonic clock. Pure."""
    bind = [place.python, *KEEPER, "bind", "--parent", str(place.parent)]
    return [
        *bind,
        *("--lock", str(place.lock), "--", place.python, "-m", "trainer.fabric"),
        f"--check={order.check}",
        f"--rank={order.rank}",
        f"--address={order.master_address}",
        f"--port={order.master_port}",
        f"--until={until:.3f}",
    ]


async def check_fabric(
    order: CheckFabric, place: HostPlace, environ: Mapping[str, str], clock: Clock
) -> Checked:
    """Take part; always with an answer, and never later than the order's limit."""
    begun = clock.monotonic()
    try:
        child = await asyncio.create_subprocess_exec(
            *render(order, place, begun + order.timeout_s - MARGIN_S),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **environ, env.HOST: place.host},
        )
    except OSError as exc:
        return _broke(order, place, f"the check could not be started: {exc}")
    left = order.timeout_s - (clock.monotonic() - begun)
    try:
        # Not on the command line, where Linux takes 128 KiB a word: too short for 10,000 names.
        names = " ".join(order.hosts).encode()
        out, err = await asyncio.wait_for(child.communicate(names), left)
    except TimeoutError:
        return _broke(order, place, f"its check gave no answer within {order.timeout_s:.0f} s")
    finally:
        if child.returncode is None:
            await _end(child)
    checked = read_checked(out)
    if checked is None:
        said = err.decode(errors="replace").strip()[-TAIL:]
        return _broke(order, place, f"its check ended with {child.returncode}: {said}")
    log.info("check %s: %s %s", order.check, checked.state, checked.why)
    return checked


async def _end(child: asyncio.subprocess.Process) -> None:
    """Kill it; one that is stuck in the kernel is left to end when it can."""
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.communicate(), REAP_S)


def read_checked(out: bytes) -> Checked | None:
    """The child's verdict, its last line; None when it gave none. Pure."""
    line = out.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        checked: Checked = decode(Checked, json.loads(line))
    except (ValueError, Invalid):
        return None
    return checked


def _broke(order: CheckFabric, place: HostPlace, why: str) -> Checked:
    log.error("check %s: %s", order.check, why)
    return Checked(check=order.check, host=place.host, state="broke", seconds=None, why=why)
