"""Fixes of the command line, as Python writes them."""

import pytest

import ndctl
from ndctl.client.errors import in_python


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("--resume continues; --new starts over", "resume=True continues; new=True starts over"),
        ("choose one with --context and --namespace", "choose one with context= and namespace="),
        ("`ndctl submit SPEC --new` in a terminal", "`ndctl submit SPEC --new` in a terminal"),
        ("ndctl run --hosts 2 -- train.py --lr 1", 'ndctl.run(["train.py", "--lr", "1"], hosts=2)'),
        ("ndctl run --set 'run.env.A=\"b\"' -- a.py", "ndctl run --set 'run.env.A=\"b\"' -- a.py"),
        ("add --newest", "add --newest"),
    ],
)
def test_a_fix_names_keywords(fix: str, expected: str) -> None:
    assert in_python(fix) == expected


def test_a_launcher_is_left_out_of_the_call() -> None:
    with pytest.raises(ndctl.SpecError, match="leave torchrun out") as refused:
        ndctl.run(["torchrun", "--nproc-per-node=2", "a.py"])
    assert refused.value.fix == 'ndctl.run(["a.py"], gpus_per_host=2)'
    assert refused.value.__suppress_context__, "a mistake has one traceback"
