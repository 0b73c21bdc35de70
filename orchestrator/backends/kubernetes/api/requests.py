"""Sends one request to the API server, with timeouts and retries.

The Python client's DynamicClient does the HTTP part: JSON of any kind, credentials, TLS and
proxies. This module adds retries and error messages.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.backends.kubernetes.api.access import Access
from orchestrator.backends.kubernetes.api.api_errors import JSON, ApiRequest, is_undecided, refusal
from orchestrator.backends.kubernetes.resources import Object
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, Unreachable
from orchestrator.seams import Clock

CONNECT_S = 5.0
READ_S = 30.0
AGAIN_S = (0.5, 2.0)
"""Pauses before the second and third try. Retry-After counts up to `MOST_S`."""
MOST_S = 10.0
APPLY = "application/apply-patch+yaml"
WARNING = re.compile(r'\b299 \S+ "((?:[^"\\]|\\.)*)"')
"""One of the header's warnings, which a proxy may put into one line."""
REDIRECTS = range(300, 400)
MOST_SHOWN = 80
"""Bytes of an unexpected answer that an error shows."""
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Content type for metadata only: name, labels and annotations, without the content."""
UNLOADED = re.compile(
    r"\b(PEM|X509|ASN1|KEY_VALUES_MISMATCH|key values mismatch|no start line)\b", re.IGNORECASE
)
"""OpenSSL's errors about a certificate or key that it reads before it connects."""
CONNECTION = re.compile(r"HTTPS?Connection(Pool)?\(host='[^']*', port=\d+\): ")
"""The prefix of urllib3's messages."""


class Requests:
    def __init__(self, access: Access, clock: Clock) -> None:
        self.access = access
        self.clock = clock
        self.sent = 0
        self.warnings: dict[str, None] = {}
        """Warning headers without repetitions, in order of arrival."""

    def json(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> Any:
        """The decoded answer. Raises BackendError."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        asked = ApiRequest(verb=verb, path=path, accept=accept)
        for wait_s in (*AGAIN_S, None):
            try:
                timeout = (CONNECT_S, READ_S)
                answer = self._send(METHODS[verb], asked, query or {}, body, content, timeout)
                self.warnings |= dict.fromkeys(warnings_in(answer.headers.get("Warning")))
                return _decoded(self.access, answer)
            except ApiException as exc:
                # A refusal is final. Only an overloaded or restarting server gets another try.
                if wait_s is None or not is_undecided(exc.status, (exc.body or "").encode()):
                    raise _refused(self.access, asked, exc) from exc
                self.clock.sleep(_retry_after(exc, wait_s))
            except (urllib3.exceptions.HTTPError, OSError) as exc:
                if wait_s is None or self._is_final(verb, exc):
                    raise unreachable(self.access, exc) from exc
                self.clock.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _is_final(self, verb: str, exc: Exception) -> bool:
        """Whether a request without an answer is not sent again."""
        import urllib3

        # A create without an answer may have succeeded; a second one would then fail with
        # "already exists".
        if verb == "create":
            return True
        # A person waits for this read, and a server that was silent for `READ_S` hardly answers the
        # next one. A pod asks some questions only once, so it waits longer.
        silent = isinstance(exc, urllib3.exceptions.ReadTimeoutError)
        return silent and METHODS[verb] == "GET" and not self.access.in_cluster

    def lines(self, asked: ApiRequest, query: Mapping[str, str], quiet_s: float) -> Iterator[bytes]:
        """Lines of an answer as they come. Raises Unanswered after `quiet_s` without a byte."""
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            answer = self._send("GET", asked, query, None, "", (CONNECT_S, quiet_s))
        except ApiException as exc:
            raise _refused(self.access, asked, exc) from exc
        except (urllib3.exceptions.HTTPError, OSError) as exc:
            raise unreachable(self.access, exc) from exc
        rest = b""
        try:
            for chunk in answer.stream(amt=None, decode_content=False):
                # A chunk may end in the middle of a line.
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
        except urllib3.exceptions.HTTPError as exc:
            raise unreachable(self.access, exc) from exc
        finally:
            answer.close()
        # The last line of a log may lack its newline.
        if rest:
            yield rest

    def _send(
        self,
        method: str,
        asked: ApiRequest,
        query: Mapping[str, str],
        body: Object | None,
        content: str,
        timeout: tuple[float, float],
    ) -> Any:
        """Send one request; returns the unread answer of a successful one.

        Raises ApiException with the status of an unsuccessful answer (0: TLS failed), and urllib3's
        errors if there is no answer.
        """
        self.sent += 1
        return self.access.client.request(
            method,
            asked.path,
            body if content != APPLY else yaml_of(body),
            query_params=[(key, value) for key, value in query.items() if value],
            header_params={"Accept": asked.accept},
            content_type=content,
            _request_timeout=timeout,
            serialize=False,
        )


METHODS: Mapping[str, str] = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}


def yaml_of(body: Object | None) -> bytes:
    """`body` as JSON that is also YAML."""
    # JSON writes a character above U+FFFF as two escapes, which YAML refuses, so it stays as it is.
    # All others outside of ASCII get one escape, because YAML reads some of them as line breaks.
    text = json.dumps(body, ensure_ascii=False)
    return re.sub(r"[\x7f-\uffff]", lambda one: f"\\u{ord(one[0]):04x}", text).encode()


def warnings_in(header: str | None) -> list[str]:
    """The texts of a Warning header (RFC 7234, 5.5), as API servers since 1.19 send it."""
    return [re.sub(r"\\(.)", r"\1", one) for one in WARNING.findall(header or "")]


def _decoded(access: Access, answer: Any) -> Any:
    """The value of a successful answer. Raises BackendError if no API server has sent it."""
    try:
        found = read_json(answer.data)
    except ValueError:
        found = None
    # An API server answers each of these requests with an object.
    if not isinstance(found, Mapping):
        raise _another_server(access, answer.headers.get("Content-Type"), answer.data)
    return found


def _another_server(access: Access, content: str | None, body: bytes) -> BackendError:
    """The error for an answer of a login page, a proxy or another program."""
    text = " ".join(body[:MOST_SHOWN].decode(errors="replace").split())
    fix = f"`kubectl{access.kubectl} cluster-info` asks the same server"
    if not access.in_cluster:
        fix = f"check the server of context {access.context} in {access.kubeconfig}"
    return BackendError(
        f"what answers at {access.server} is not a Kubernetes API server"
        f" ({content or 'no content type'}: {text or 'empty'})",
        fix=f"{fix}, and HTTPS_PROXY",
    )


def _retry_after(exc: Any, wait_s: float) -> float:
    said = (exc.headers or {}).get("Retry-After")
    with contextlib.suppress(TypeError, ValueError):
        # A server may name minutes, for which a terminal command should not wait. Retry-After may
        # also be a date, which is ignored.
        return min(float(said or ""), MOST_S)
    return wait_s


def _refused(access: Access, asked: ApiRequest, exc: Any) -> BackendError:
    """The error for the client's ApiException, which has no status if TLS failed."""
    # The client reports a failed TLS handshake as an ApiException without a status.
    if not exc.status:
        said = " ".join(str(exc.reason).partition("\n")[2].split())
        return _unusable_key(access, said) or unreachable(access, exc, said)
    # API servers do not redirect these requests, but login pages do.
    if exc.status in REDIRECTS:
        to = f"redirect to {(exc.headers or {}).get('Location')}"
        return _another_server(access, to, (exc.body or "").encode())
    return refusal(asked, exc.status, (exc.body or "").encode())


def _unusable_key(access: Access, said: str) -> BackendError | None:
    """The error if OpenSSL could not load the certificates or the key of the user; None: another
    failure of TLS. The server may be up."""
    if not UNLOADED.search(said):
        return None
    return BackendError(
        f"the certificates of context {access.context} in {access.kubeconfig} cannot be used:"
        f" {said}",
        fix=f"log in to the cluster again; `kubectl{access.kubectl} auth can-i --list` shows if it"
        " worked",
    )


def unreachable(access: Access, exc: Exception, said: str = "") -> Unreachable:
    """The connection failed or broke. `said`: why, if the caller knows it."""
    return Unreachable(
        f"{access.shown} is unreachable: {said or _why(exc)}",
        fix=f"`kubectl{access.kubectl} cluster-info` shows whether it is up",
    )


def _why(exc: Exception) -> str:
    """The cause, without memory addresses of objects and without the host, which the message
    has."""
    cause = exc.__cause__
    # "Connection refused" says more than urllib3's text about its pools.
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    words = CONNECTION.sub("", str(exc).split("object at 0x")[-1].split(">: ")[-1])
    return " ".join(words.split()) or type(exc).__name__
