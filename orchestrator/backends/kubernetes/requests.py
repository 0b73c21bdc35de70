"""One request to the API server: with timeouts, asked again where that may help."""

import contextlib
from collections.abc import Iterator, Mapping
from json import dumps
from typing import Any
from urllib.parse import quote, urlencode

from orchestrator.backends.kubernetes.access import Access
from orchestrator.backends.kubernetes.refusals import AGAIN, Asked, refusal
from orchestrator.backends.kubernetes.resources import Object
from orchestrator.contract.read_json import read_json
from orchestrator.errors import Unanswered
from orchestrator.seams import Clock

CONNECT_S = 5.0
READ_S = 30.0
TRIES = 3
AGAIN_S = (0.5, 2.0)
"""Before a second and a third try; Retry-After is heard up to `MOST_S`."""
MOST_S = 10.0
APPLY = "application/apply-patch+yaml"


class Requests:
    def __init__(self, access: Access, clock: Clock) -> None:
        self.access = access
        self.clock = clock
        self.sent = 0

    def json(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = "application/json",
    ) -> Any:
        asked = Asked(verb=verb, path=path)
        method = METHODS[verb]
        for wait_s in (*AGAIN_S[: TRIES - 1], None):
            try:
                answer = self.send(method, asked, query or {}, body, content, (CONNECT_S, READ_S))
            except Unanswered:
                if wait_s is None or verb == "create":
                    raise
                self.clock.sleep(wait_s)
                continue
            said = answer.read()
            if 200 <= answer.status < 300:
                return read_json(said)
            if answer.status not in AGAIN or wait_s is None:
                raise refusal(asked, answer.status, said)
            self.clock.sleep(_retry_after(answer.getheader("Retry-After"), wait_s))
        raise AssertionError("the last try returns or raises")

    def send(
        self,
        method: str,
        asked: Asked,
        query: Mapping[str, str],
        body: Object | None,
        content: str,
        timeout: tuple[float, float],
    ) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        said = urlencode({key: value for key, value in query.items() if value}, quote_via=quote)
        url = f"{self.access.server}{asked.path}" + (f"?{said}" if said else "")
        headers = {"Accept": "application/json", **self.access.headers()}
        data: Any = body
        if body is not None:
            headers["Content-Type"] = content
            data = dumps(body) if content == APPLY else body  # the client dumps JSON itself
        self.sent += 1
        try:
            return self.access.rest.request(method, url, headers, data, _request_timeout=timeout)
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as exc:
            raise unanswered(asked, exc) from exc

    def lines(self, asked: Asked, query: Mapping[str, str], quiet_s: float) -> Iterator[bytes]:
        import urllib3

        answer = self.send("GET", asked, query, None, "", (CONNECT_S, quiet_s))
        if answer.status != 200:
            raise refusal(asked, answer.status, answer.read())
        rest = b""
        try:
            for chunk in answer.response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        except urllib3.exceptions.HTTPError as exc:
            raise unanswered(asked, exc) from exc
        finally:
            answer.response.close()
        if rest:
            yield rest


METHODS: Mapping[str, str] = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}


def _retry_after(said: str | None, wait_s: float) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return min(float(said or ""), MOST_S)
    return wait_s


def unanswered(asked: Asked, exc: Exception) -> Unanswered:
    words = str(exc).split("object at 0x")[-1].split(">: ")[-1]
    return Unanswered(
        f"the API server cannot be reached ({asked}): {words or type(exc).__name__}",
        fix="`kubectl cluster-info` says whether it is up; is the context the right one?",
    )
