import pytest

from orchestrator.backends.slurm.on_nodes.address import (
    choose_address,
    interface_of,
    resolve,
    routed_towards,
)


@pytest.mark.parametrize(
    ("resolved", "node_addr", "routed", "chosen"),
    [
        ("10.0.0.1", "", None, "10.0.0.1"),
        ("10.0.0.1", "172.16.0.1", "172.16.0.1", "10.0.0.1"),
        ("127.0.1.1", "node1", "10.0.0.1", "10.0.0.1"),
        ("127.0.1.1", "127.0.1.1", "127.0.0.1", "127.0.1.1"),
        ("127.0.1.1", "10.0.0.7", None, "10.0.0.7"),
        ("127.0.1.1", "node1", "127.0.0.1", "127.0.1.1"),
        (None, "10.0.0.7", None, "10.0.0.7"),
        (None, "n1-ib.cluster", None, "172.16.0.1"),
        ("127.0.1.1", "n1-ib.cluster", "10.0.0.1", "172.16.0.1"),
        (None, "no-such-name", "10.0.0.1", "10.0.0.1"),
        (None, "no-such-name", None, None),
        (None, "", None, None),
    ],
)
def test_the_address_is_reachable_from_other_hosts(
    resolved: str | None, node_addr: str, routed: str | None, chosen: str | None
) -> None:
    names = {"node1": "127.0.1.1", "n1-ib.cluster": "172.16.0.1"}
    assert choose_address(resolved, node_addr, routed, names.get) == chosen


def test_loopback_has_an_interface_and_a_name() -> None:
    assert resolve("localhost") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_the_first_usable_route_to_other_hosts_is_used() -> None:
    assert routed_towards(["no-such-host.invalid", "127.0.0.1"]) == "127.0.0.1"
    assert routed_towards([]) is None
    assert resolve("no-such-host.invalid") is None
