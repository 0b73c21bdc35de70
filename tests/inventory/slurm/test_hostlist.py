"""Slurm's host lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid
from orchestrator.inventory.slurm.hostlist import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[001-003,130]", ["n001", "n002", "n003", "n130"]),
        ("gpu-[1-2]-[1-2]", ["gpu-1-1", "gpu-1-2", "gpu-2-1", "gpu-2-2"]),
        ("a,b[09-10]x", ["a", "b09x", "b10x"]),
        ("10.140.71.103,10.140.88.115", ["10.140.71.103", "10.140.88.115"]),
        ("(null)", []),
        ("", []),
    ],
)
def test_expands(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[1,,2]", "n[[1]]", "n[]", "n[٣-٤]"]
)
def test_a_malformed_host_list_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        expand(text)
    assert caught.value.problems[0].path == "hostlist"


def test_a_huge_range_is_refused_at_once() -> None:
    for text in ("n[0-99999999999]", "n[0-99999]-[0-99]", "n[0-999999,0-999999]"):
        with pytest.raises(Invalid, match="1,000,000"):
            expand(text)
    with pytest.raises(Invalid, match="at most 18 digits"):
        expand(f"n[0-{'9' * 5000}]")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n003", "n001", "n002", "n130"], "n[001-003,130]"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["login", "g1x"], "g1x,login"),
        (["n0", "n1", "n10"], "n[0-1,10]"),
        (["a", "a1"], "a,a1"),
        (["cn01a", "cn02a", "cn03"], "cn01a,cn02a,cn03"),  # nothing may follow a bracket
        (["g2.hpc.local", "g1.hpc.local"], "g1.hpc.local,g2.hpc.local"),
        (["r1-n2", "r1-n1", "r1-n3"], "r1-n[1-3]"),
        ([], ""),
    ],
)
def test_folds(names: list[str], text: str) -> None:
    assert fold(names) == text


names = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,4}){0,2}[a-z]?", fullmatch=True)


@given(st.lists(names, max_size=12))
def test_folding_and_expanding_give_the_same_names(some: list[str]) -> None:
    folded = fold(some)
    assert "]" not in folded.replace("],", "").removesuffix("]")  # Slurm reads no other lists
    found = expand(folded)
    assert len(found) == len(set(found))
    assert set(found) == set(some)
