"""This host's part in the all-reduce check of all hosts: a child that dies with the agent."""

import asyncio
import logging
import shlex
from collections.abc import Mapping

from orchestrator.agent.processes.fork_server import Ended
from orchestrator.agent.processes.fork_server_client import Standby
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files import env
from orchestrator.contract.messages.agent_protocol import Checked, CheckFabric
from orchestrator.contract.read_json import read_json
from orchestrator.run_module import command
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

MARGIN_S = 1.0
"""The child gives up this much before the order's limit, so that it can report why."""
TAIL = 300
"""Characters of the child's standard error that are reported."""


def render(order: CheckFabric, place: HostPlace, until: float) -> list[str]:
    """The child's command line. Pure.

    Args:
        until: when the child gives up, on the monotonic clock.
    """
    return [
        *command(place.python, "trainer.rank.allreduce_check"),
        f"--check={order.check}",
        f"--rank={order.rank}",
        f"--address={order.master_address}",
        f"--port={order.master_port}",
        f"--until={until:.3f}",
    ]


async def check_fabric(
    order: CheckFabric,
    place: HostPlace,
    standby: Standby,
    environ: Mapping[str, str],
    clock: Clock,
) -> Checked:
    """Run the check. Always returns a result, within the order's limit."""
    command = render(order, place, clock.monotonic() + order.timeout_s - MARGIN_S)
    known = {**environ, env.HOST: place.host}
    # By standard input: Linux limits an argument to 128 KiB, too short for 10,000 names.
    names = " ".join(order.hosts)
    try:
        async with asyncio.timeout(order.timeout_s):
            tried = await standby.try_out(command, known, title=shlex.join(command), given=names)
    # The child gives up earlier by itself, unless its process is stopped.
    except TimeoutError:
        return _broke(order, place, f"the check timed out after {order.timeout_s:.0f} s")
    except OSError as exc:
        return _broke(order, place, f"failed to start the check: {exc}")
    checked = read_checked(tried)
    if checked is None:
        error = tried.err.strip()[-TAIL:]
        return _broke(order, place, f"the check ended with exit code {tried.code}: {error}")
    log.info("check %s: %s %s", order.check, checked.state, checked.why)
    return checked


def read_checked(tried: Ended) -> Checked | None:
    """The result in the child's last line; None if it has none. Pure."""
    # Libraries may print to standard output as well, but only before the result.
    line = tried.out.strip().rpartition("\n")[2]
    try:
        checked: Checked = decode(Checked, read_json(line))
    except (ValueError, Invalid):
        return None
    return checked


def _broke(order: CheckFabric, place: HostPlace, why: str) -> Checked:
    log.error("check %s: %s", order.check, why)
    return Checked(check=order.check, host=place.host, state="broke", why=why)
