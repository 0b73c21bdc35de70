"""Partners that keep copies of checkpoints: laws for any cluster, and what they prefer."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.mesh import Mesh
from orchestrator.plan.placement.partners import partners_of


@given(
    hosts=st.integers(1, 40),
    copies=st.integers(0, 2),
    leaves=st.lists(st.integers(0, 5), min_size=40, max_size=40),
    unknown=st.integers(0, 40),
)
def test_each_host_sends_to_and_keeps_for_the_same_number_of_others(
    hosts: int, copies: int, leaves: list[int], unknown: int
) -> None:
    names = [f"h{number}" for number in range(hosts)]
    switches = {
        name: ("spine", f"leaf-{leaf}")
        for name, leaf in zip(names, leaves, strict=False)
        if int(name[1:]) != unknown
    }
    mesh = Mesh(dp_shard=2 * hosts)
    found = partners_of(mesh, 2, names, switches, copies)
    assert found == partners_of(mesh, 2, names, switches, copies)
    expected = min(copies, hosts - 1)
    assert all(len({node, *partners}) == 1 + expected for node, partners in enumerate(found))
    keeps = Counter(partner for partners in found for partner in partners)
    assert all(keeps[node] == expected for node in range(hosts))


@given(size=st.integers(1, 5), num=st.integers(2, 6), copies=st.integers(1, 2))
def test_copies_are_behind_other_switches_where_there_are_enough(
    size: int, num: int, copies: int
) -> None:
    names = [f"h{number}" for number in range(size * num)]
    switches = {name: (f"leaf-{number // size}",) for number, name in enumerate(names)}
    found = partners_of(Mesh(dp_shard=size * num), 1, names, switches, copies)
    for node, partners in enumerate(found):
        leaves = {one // size for one in (node, *partners)}
        assert len(leaves) == min(num, 1 + copies)


def test_hosts_of_an_uneven_cluster_avoid_their_switch() -> None:
    """Three hosts behind one leaf, and one behind each of three others."""
    names = ["a", "b", "c", "d", "e", "f"]
    leaf = {"a": "x", "b": "x", "c": "x", "d": "1", "e": "2", "f": "3"}
    found = partners_of(Mesh(dp_shard=6), 1, names, {n: (leaf[n],) for n in names}, 1)
    assert all(leaf[names[node]] != leaf[names[to]] for node, (to,) in enumerate(found))


def test_a_partner_is_in_other_parallel_groups_where_that_is_possible() -> None:
    """Two pipeline stages on two hosts each, with replicas: the host that shares neither the stage
    nor the replica keeps the copy."""
    mesh = Mesh(pp=2, dp_replicate=2)
    names = ["a", "b", "c", "d"]
    found = partners_of(mesh, 1, names, {}, 1)
    for node, (partner,) in enumerate(found):
        one, other = mesh.coords(node), mesh.coords(partner)
        assert all(one[axis] != other[axis] for axis in ("pp", "dp_replicate"))


def test_thousands_of_hosts_are_paired_in_seconds() -> None:
    names = [f"h{number}" for number in range(2_000)]
    switches = {name: ("spine", f"leaf-{number // 16}") for number, name in enumerate(names)}
    mesh = Mesh(pp=16, dp_shard=125, tp=8)
    found = partners_of(mesh, 8, names, switches, 1)
    assert all(node // 16 != partner // 16 for node, (partner,) in enumerate(found))
