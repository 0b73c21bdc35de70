"""Ranks and their coordinates in the mesh."""

import math
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.mesh import AXES, Mesh

degrees = st.integers(1, 4)
meshes = st.builds(Mesh, pp=degrees, dp_replicate=degrees, dp_shard=degrees, cp=degrees, tp=degrees)


def rank_at(mesh: Mesh, coords: Mapping[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * getattr(mesh, axis) + coords[axis]
    return rank


@settings(deadline=None)
@given(meshes)
def test_ranks_and_coordinates_are_a_bijection(mesh: Mesh) -> None:
    every = [mesh.coords(rank) for rank in range(mesh.world_size)]
    assert [rank_at(mesh, coords) for coords in every] == list(range(mesh.world_size))
    assert mesh.world_size == math.prod(mesh.degrees)


def test_neighbouring_ranks_differ_in_tp() -> None:
    mesh = Mesh(dp_shard=2, tp=2)
    assert [tuple(mesh.coords(rank).values()) for rank in range(4)] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 1),
        (0, 0, 1, 0, 0),
        (0, 0, 1, 0, 1),
    ]


def test_a_mesh_is_shown_by_the_axes_that_split() -> None:
    assert str(Mesh(dp_shard=2, tp=4)) == "dp_shard=2 x tp=4"
    assert str(Mesh()) == "1 rank"
