"""What is said of an option of Slurm can be typed."""

import re

import pytest

from orchestrator.contract.codec import decode
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.specs.keys import all_keys
from orchestrator.specs.slurm_options import SBATCH, SENTENCES, SRUN, fix_of_option


@pytest.mark.parametrize("name", sorted(SBATCH | SRUN))
def test_an_option_that_is_handed_on_is_taken_there(name: str) -> None:
    fix = fix_of_option(f"cluster.slurm.{name}", name)
    assert fix is not None
    key, option = re.fullmatch(r'write cluster\.slurm\.(\w+): \["(.+)"\]', fix).groups()  # type: ignore[union-attr]
    spec: SlurmSpec = decode(SlurmSpec, {key: [option.replace("…", "x")]})
    assert getattr(spec, key) == (f"--{name.replace('_', '-')}=x",)


def test_keys_that_are_named_exist() -> None:
    keys = {key.path for key in all_keys()}
    for sentence in SENTENCES.values():
        assert keys.issuperset(re.findall(r"(?:cluster|run)(?:\.[a-z_]+)+", sentence)), sentence


def test_other_sections_have_no_options_of_slurm() -> None:
    assert fix_of_option("cluster.kubernetes.nice", "nice") is None
    assert fix_of_option("cluster.slurm.partitoin", "partitoin") is None
