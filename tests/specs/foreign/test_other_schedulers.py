"""Scripts of PBS, LSF, Grid Engine and Cobalt."""

from pathlib import PurePath

import pytest

from orchestrator.specs.foreign.other_schedulers import directives_in
from orchestrator.specs.foreign.taking_over import taken_over


@pytest.mark.parametrize(
    ("directives", "tool", "hosts", "gpus"),
    [
        ("#PBS -N big\n#PBS -l select=6:ncpus=32:ngpus=4\n", "PBS", 6, 4),
        ("#PBS -l nodes=3:ppn=8:gpus=2\n", "PBS", 3, 2),
        ('#BSUB -nnodes 5\n#BSUB -n 40\n#BSUB -gpu "num=6:mode=shared"\n', "LSF", 5, 6),
        ("#$ -l h_rt=1:00:00\n#$ -cwd\n", "Grid Engine", 1, 1),
        ("#COBALT -n 2\n", "Cobalt", 2, 1),
    ],
)
def test_hosts_and_gpus_are_taken_and_the_rest_is_said(
    directives: str, tool: str, hosts: int, gpus: int
) -> None:
    text = f"#!/bin/bash\n{directives}\nmpiexec python train.py --steps 3\n"
    carried = taken_over(text, PurePath("job.pbs"))
    assert carried.run == {"script": "train.py", "args": ["--steps", "3"]}
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (hosts, gpus)
    said = "\n".join(carried.notes())
    assert f"set cluster.backend to slurm or kubernetes: ndctl cannot submit to {tool}" in said
    for number, line in enumerate(directives.splitlines(), start=2):
        assert f"not taken over: line {number}: {line}" in said


def test_a_comment_is_no_directive() -> None:
    assert [*directives_in("# PBS -l x\n#$1\n#PBSX -l y\n# $ -l z\n")] == []
