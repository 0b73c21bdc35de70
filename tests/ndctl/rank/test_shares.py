from hypothesis import given
from hypothesis import strategies as st

from ndctl.rank.checkpoint_files import shares


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 100)), st.integers(1, 6))
def test_every_file_is_read_once_and_ranks_read_about_equal_amounts(
    sizes: dict[str, int], num_ranks: int
) -> None:
    given = shares(sizes, num_ranks)
    assert len(given) == num_ranks
    assert sorted(name for names in given for name in names) == sorted(sizes)
    loads = [sum(sizes[name] for name in names) for names in given]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_the_largest_files_go_to_different_ranks() -> None:
    assert shares({"a": 9, "b": 1, "c": 8, "d": 2}, 2) == [["a", "b"], ["c", "d"]]
