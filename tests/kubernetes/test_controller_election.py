"""Two controllers compete for a Lease of a real API server."""

import threading
import time

import pytest

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.election import Election
from orchestrator.system import SystemClock
from tests.kubernetes.testbed import KubeTestbed

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
LEASE_S = 3


def contender(kube: KubeTestbed, identity: str) -> Election:
    api = Api(None, {"KUBECONFIG": str(kube.kubeconfig)}, SystemClock())
    return Election(api, "default", identity, LEASE_S, threading.Event())


def test_the_second_controller_acts_after_the_first_releases_the_lease(kube: KubeTestbed) -> None:
    first, second = contender(kube, "first"), contender(kube, "second")
    first.begin()
    kube.wait_for("a holder", lambda: first.acts)
    second.begin()
    kube.wait_for("the second to see the first", lambda: second.other == "first")
    assert first.acts
    assert not second.acts
    assert second.turned.is_set()

    first.end()
    assert not first.acts
    begun = time.monotonic()
    kube.wait_for("the second to act", lambda: second.acts)
    assert time.monotonic() - begun < LEASE_S, "the Lease need not expire"
    second.end()
    lease = kube.get("leases.coordination.k8s.io", "ndctl-controller", "default")["spec"]
    assert not lease.get("holderIdentity")
    assert lease["leaseDurationSeconds"] == LEASE_S


@pytest.mark.slow
def test_a_holder_without_the_server_stops_acting_and_resumes_later(kube: KubeTestbed) -> None:
    alone = contender(kube, "alone")
    alone.begin()
    kube.wait_for("a holder", lambda: alone.acts)
    kube.stop_control_plane()
    kube.wait_for("it to stop acting", lambda: not alone.acts)
    kube.start_control_plane()
    kube.wait_for("a holder again", lambda: alone.acts)
    alone.end()
