"""A log of refused connections that strangers cannot fill."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from aiohttp import web

log = logging.getLogger(__name__)

SILENT = logging.getLogger(f"{__name__}.access")
"""Replaces aiohttp's log of every request, and writes nothing."""
SILENT.setLevel(logging.CRITICAL)
TELL_S = 60.0
"""Least time between two log lines about refused connections."""


def invalid_request(status: int) -> web.Response:
    """The answer to what is not HTTP."""
    refusal = web.Response(status=status, text="invalid request")
    # Nothing can be parsed after an invalid request, so the connection ends.
    refusal.force_close()
    return refusal


class Refusals:
    """Counts refused connections, and logs the counts at most once a minute."""

    def __init__(self, place: str, tell: Callable[[str], None] = log.warning) -> None:
        self.place = place
        self.counts: Counter[str] = Counter()
        self.total = 0
        self.tell = tell
        self.later: asyncio.TimerHandle | None = None

    def count(self, why: str) -> None:
        self.counts[why] += 1
        self.total += 1
        # Nothing was logged within the last minute, so a person sees the first refusal at once.
        if self.later is None:
            self.later = asyncio.get_running_loop().call_later(TELL_S, self._tell_more)
            self._tell()

    def close(self) -> None:
        if self.later is not None:
            self.later.cancel()
        self._tell()

    def _tell_more(self) -> None:
        self.later = None
        # A minute without refusals ends the series. The next refusal is logged at once again.
        if self.counts:
            self.later = asyncio.get_running_loop().call_later(TELL_S, self._tell_more)
            self._tell()

    def _tell(self) -> None:
        if self.counts:
            found = ", ".join(f"{count} {why}" for why, count in sorted(self.counts.items()))
            self.tell(f"refused connections at {self.place}: {found}")
            self.counts.clear()


class Connection(web.RequestHandler):
    """One connection. aiohttp would log each invalid request with a traceback."""

    __slots__ = ("refusals",)

    def __init__(self, server: web.Server, refusals: Refusals) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=SILENT)
        self.refusals = refusals

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:  # a defect of the server: log it with its traceback
            return super().handle_error(request, status, exc, message)
        self.refusals.count("sent an invalid HTTP request")
        return invalid_request(status)
