"""The server inside a leader, for its own job. It never stops or slows the job: if it cannot start,
the leader's log says why."""

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.reporting.web_spec import WebSpec
from orchestrator.job_secret import JobSecret, server_context
from orchestrator.posix.run_with_timeout import within
from orchestrator.posix.secret_ref import NoSecret, secret_of
from orchestrator.seams import Clock
from orchestrator.web.access import Access
from orchestrator.web.fleet import Fleet, Place
from orchestrator.web.metrics.exposition import Exposition
from orchestrator.web.server import Listening, Looker, application, serving

log = logging.getLogger(__name__)

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
READ_S = 10.0
"""Limit for reading the token."""

Figures = Callable[[], Mapping[str, Sequence[float]]]
"""Figures of all ranks, as of `Monitor.rank_figures`."""


class LeaderWeb(Struct, frozen=True, kw_only=True):
    """What the server needs of its leader."""

    run_dir: RunDir
    secret: JobSecret
    folder: Path
    """For the certificate; only this process may enter it."""
    figures: Figures


@asynccontextmanager
async def serving_job(
    spec: WebSpec, leader: LeaderWeb, environ: Mapping[str, str], clock: Clock
) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        try:
            app, listening = await _prepared(spec, leader, environ, clock)
            port = await stack.enter_async_context(serving(app, listening))
            log.info("serving metrics at %s port %s", spec.bind, port)
        except (OSError, NoSecret) as exc:  # TimeoutError is an OSError
            log.warning("serving no metrics: %s", exc or "reading the token timed out")
        yield


async def _prepared(
    spec: WebSpec, leader: LeaderWeb, environ: Mapping[str, str], clock: Clock
) -> tuple[web.Application, Listening]:
    token = None
    if spec.token is not None:
        token = await within(READ_S, secret_of, spec.token, environ)
    names = frozenset({"localhost", spec.bind, f"[{spec.bind}]"}) if token is None else None
    fleet = Fleet(lambda: [Place(run_dir=leader.run_dir)], clock, led=True)
    tls = None if spec.is_private else server_context(leader.secret, leader.folder)
    app = application(
        Looker(fleet.look),
        Access(token=token, names=names),
        Exposition(),
        lambda: {name: quantiles(values) for name, values in leader.figures().items()},
    )
    return app, Listening(bind=spec.bind, port=spec.port, tls=tls)


def quantiles(values: Sequence[float]) -> Mapping[float, float]:
    """Quantile -> value, by the nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {one: ordered[min(last, max(0, math.ceil(one * len(ordered)) - 1))] for one in QUANTILES}
