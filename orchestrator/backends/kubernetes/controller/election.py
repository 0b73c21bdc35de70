"""Leader election: the controller that holds the Lease acts.

The Python client implements the election. Safety does not depend on it: each action names the
version or the uid of its object, so two controllers at the same time do nothing twice.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.controller_client import LEASE
from orchestrator.backends.kubernetes.resources import LEASES
from orchestrator.errors import Unanswered

log = logging.getLogger(__name__)

THEIRS = "kubernetes.leaderelection"
CONNECT_S = 2.0


class Election:
    """Runs in its own thread, so that slow requests do not delay the renewal."""

    def __init__(
        self, api: Api, namespace: str, me: str, duration_s: int, turned: threading.Event
    ) -> None:
        """`duration_s`: at least 3. `turned` is set whenever the Lease is won or lost, and when
        another controller is seen to live."""
        self.api, self.namespace, self.me, self.duration_s = api, namespace, me, duration_s
        self.turned = turned
        self.leading = threading.Event()
        self.stopping = threading.Event()
        self.other: str | None = None
        """The other controller that was seen to renew the Lease."""
        self.seen: tuple[str, datetime | None] | None = None
        self.lock: Any = None
        self.asking = threading.RLock()

    @property
    def acts(self) -> bool:
        return self.leading.is_set()

    def begin(self) -> None:
        """Raises BackendError without the right to the Lease."""
        # An unreachable server is no missing right: the election waits for it.
        with contextlib.suppress(Unanswered):
            self.api.get(LEASES, self.namespace, LEASE)
        self.lock = self._made_lock()
        threading.Thread(target=self._contend, name="election", daemon=True).start()

    def _contend(self) -> None:
        electing: Any = import_module(f"{THEIRS}.leaderelection")
        config: Any = import_module(f"{THEIRS}.electionconfig")
        logging.getLogger("leaderelection").setLevel(
            logging.WARNING
        )  # the client logs a line for each renewal
        made = config.Config(
            self.lock,
            lease_duration=self.duration_s,
            # The holder gives up before its Lease expires, so that it has stopped when another one
            # begins.
            renew_deadline=self.duration_s * 2 / 3,
            retry_period=max(1.0, self.duration_s / 7),
            onstarted_leading=lambda: self._turn(self.leading.set, "leads"),
            onstopped_leading=lambda: self._turn(self.leading.clear, "no longer leads"),
        )
        while not self.stopping.is_set():
            # The client's `run` returns when the Lease is lost. The loop contends for it again.
            electing.LeaderElection(made).run()

    def _turn(self, change: Callable[[], None], words: str) -> None:
        # At the end the Lease is released on purpose, and the loop no longer needs to know.
        if not self.stopping.is_set():
            change()
            log.info("%s %s", self.me, words)
            self.turned.set()

    def _made_lock(self) -> Any:
        from kubernetes.client import CoordinationV1Api

        locks: Any = import_module(f"{THEIRS}.resourcelock.leaselock")
        made = locks.LeaseLock(LEASE, self.namespace, self.me)
        leases = CoordinationV1Api(self.api.access.client.client)
        made.api_instance = _Bounded(leases, self.duration_s / 3, self.asking, self._saw)
        return made

    def _saw(self, lease: Any) -> None:
        """A Lease that changes while another controller holds it shows that it is alive."""
        spec = lease.spec
        now = (spec.holder_identity or "", spec.renew_time)
        # A Lease that is only read shows nothing: its holder may have died. A changed time shows
        # that it lives.
        renewed = self.seen is not None and self.seen != now and self.seen[0] == now[0]
        if renewed and now[0] not in ("", self.me) and self.other is None:
            self.other = now[0]
            self.turned.set()
        self.seen = now

    def end(self) -> None:
        """Release the Lease, so that a standby need not wait until it expires."""
        self.stopping.set()
        # The Lease belongs to another controller, or to none.
        if not self.leading.is_set():
            return
        # Stop acting before the release, because another controller may act right after it.
        self.leading.clear()
        self.asking.acquire()  # never released, so that the election's thread stops renewing
        now = str(datetime.fromtimestamp(self.api.clock.now(), UTC))
        records: Any = import_module(f"{THEIRS}.leaderelectionrecord")
        free = records.LeaderElectionRecord("", str(self.duration_s), now, now)
        self.lock.get(LEASE, self.namespace)  # for its version
        if self.lock.update(LEASE, self.namespace, free):
            log.info("%s releases the Lease", self.me)
        else:
            log.warning("failed to release the Lease; it expires in %d s", self.duration_s)


class _Bounded:
    """The client's Lease API with timeouts. All failures become ApiException, because the client's
    lock handles only this; any other exception would end the election."""

    def __init__(
        self,
        leases: Any,
        most_s: float,
        one_by_one: AbstractContextManager[Any],
        saw: Callable[[Any], None],
    ) -> None:
        self.leases, self.most_s, self.one_by_one, self.saw = leases, most_s, one_by_one, saw

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        call = getattr(self.leases, name)

        def bounded(*args: Any, **options: Any) -> Any:
            try:
                with self.one_by_one:
                    lease = call(*args, **options, _request_timeout=(CONNECT_S, self.most_s))
            # The server is unreachable: the client tries again until `renew_deadline`.
            except (HTTPError, OSError) as exc:
                raise ApiException(status=0, reason=str(exc)) from exc
            self.saw(lease)
            return lease

        return bounded
