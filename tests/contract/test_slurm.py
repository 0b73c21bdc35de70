import pytest

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.slurm import SlurmSpec


@pytest.mark.parametrize(
    "flag",
    [
        *("--job-name=x", "--job-name x", "-J x", "-Jx", "--comment=x", "--array=1-3", "-a1"),
        *("--nodes=3", "-N3", "-n4", "--ntasks 4", "--ntasks-per-node=8", "--tasks-per-node=8"),
        *("--no-requeue", "--signal=B:USR1@60", "--wrap=date", "--no-kill=off", "--wait", "-W"),
        *("--test-only", "-M other", "--clusters=other", "-x node3", "--exclude=node3"),
    ],
)
def test_what_ndctl_says_itself_is_no_further_option_of_sbatch(flag: str) -> None:
    """Under another name or comment the job would not be found, and be submitted twice."""
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"sbatch_args": ["--nice=5", flag]})
    (problem,) = failed.value.problems
    assert (problem.path, problem.value) == ("sbatch_args[1]", flag)
    assert "cluster.hosts" in problem.fix


def test_every_option_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"sbatch_args": ["-Jx", "nice", "--wrap=x"], "srun_args": ["-n4"]})
    assert [problem.path for problem in failed.value.problems] == [
        *("sbatch_args[0]", "sbatch_args[1]", "sbatch_args[2]"),
    ]


@pytest.mark.parametrize(
    "flag",
    [
        *("--nice=5", "-H", "--dependency=afterok:7", "--exclusive=user", "--nodelist=node1"),
        *("--wait-all-nodes=1", "--network=sn_all", "--gres-flags=enforce-binding", "-w node1"),
        *("--no-bell", "--requeue", "--export=ALL", "--core-spec=1", "--switches=4", "-C h100"),
    ],
)
def test_other_options_are_passed_on(flag: str) -> None:
    assert decode(SlurmSpec, {"sbatch_args": [flag]}).sbatch_args == (flag,)
