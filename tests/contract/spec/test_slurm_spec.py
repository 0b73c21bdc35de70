"""The Slurm part of a spec: options, time, partitions, environment, permissions."""

import pytest

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.spec.slurm_spec import SlurmSpec, plain_secrets


@pytest.mark.parametrize(
    "flag",
    [
        *("--job-name=x", "--job-name x", "-J x", "-Jx", "--comment=x", "--array=1-3", "-a1"),
        *("--nodes=3", "-N3", "-n4", "--ntasks 4", "--ntasks-per-node=8", "--tasks-per-node=8"),
        *("--no-requeue", "--signal=B:USR1@60", "--wrap=date", "--no-kill=off", "--wait", "-W"),
        *("--test-only", "-M other", "--clusters=other", "-x node3", "--exclude=node3"),
    ],
)
def test_options_of_sbatch_that_ndctl_sets_itself_are_refused(flag: str) -> None:
    """With another name or comment ndctl would not find the job and would submit it twice."""
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"sbatch_args": ["--nice=5", flag]})
    (problem,) = failed.value.problems
    assert (problem.path, problem.value) == ("sbatch_args[1]", flag)
    assert "cluster.hosts" in problem.fix


def test_every_option_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"sbatch_args": ["-Jx", "nice", "--wrap=x"], "srun_args": ["-n4"]})
    assert [problem.path for problem in failed.value.problems] == [
        *("sbatch_args[0]", "sbatch_args[1]", "sbatch_args[2]")
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


@pytest.mark.parametrize(
    ("time", "notice_s", "limit_s"),
    [("2", 300, 120), (1, 90, 60), ("0:90", 90, 90), ("1:30:00", 5400, 5400)],
)
def test_notice_s_must_be_less_than_the_time_limit(
    time: str | int, notice_s: float, limit_s: int
) -> None:
    """Otherwise each allocation would end before its first step."""
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"time": time, "notice_s": notice_s})
    (problem,) = failed.value.problems
    assert (problem.path, problem.value) == ("notice_s", notice_s)
    assert problem.limit.startswith(f"less than {limit_s} s, cluster.slurm.time; ")
    half = float(problem.fix.split("notice_s to ")[1].split()[0])
    assert decode(SlurmSpec, {"time": time, "notice_s": half}).notice_s == half
    for unlimited in ("0", None):
        assert decode(SlurmSpec, {"time": unlimited, "notice_s": notice_s})


def test_partitions_are_one_several_with_commas_or_a_list() -> None:
    assert decode(SlurmSpec, {}).partitions == ()
    assert decode(SlurmSpec, {"partition": "train"}).partitions == ("train",)
    assert decode(SlurmSpec, {"partition": "train,debug"}).partitions == ("train", "debug")
    assert decode(SlurmSpec, {"partition": ["train", "debug"]}).partitions == ("train", "debug")
    with pytest.raises(Invalid, match="partition: must be one partition or more"):
        decode(SlurmSpec, {"partition": []})


def test_all_variables_that_must_not_be_set_are_reported_at_once() -> None:
    names = ("NCCL_DEBUG", "MASTER_PORT", "SLURM_CPU_BIND", "NDCTL_RUN_DIR", "1ST", "A-B", "PATH")
    with pytest.raises(Invalid) as failed:
        decode(SlurmSpec, {"env": dict.fromkeys(names, "x")})
    assert [problem.path for problem in failed.value.problems] == [
        *("env.MASTER_PORT", "env.SLURM_CPU_BIND", "env.NDCTL_RUN_DIR", "env.1ST", "env.A-B")
    ]


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("HF_TOKEN", "abc", True),
        ("WANDB_API_KEY", "abc", True),
        ("DB_PASSWORD", "abc", True),
        ("HF_TOKEN", "/home/me/token", False),
        ("HF_TOKEN", "", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
    ],
)
def test_a_secret_in_plain_text_is_detected_by_its_name(
    name: str, value: str, is_found: bool
) -> None:
    assert plain_secrets(SlurmSpec(env={name: value})) == ((f"env.{name}",) if is_found else ())


@pytest.mark.parametrize("mode", [700, 750, 755, 770, 775])
def test_permissions_are_written_as_for_chmod(mode: int) -> None:
    assert decode(SlurmSpec, {"mode": mode}).mode == mode


@pytest.mark.parametrize("mode", [488, 777, 640, 0])
def test_other_permissions_are_refused(mode: int) -> None:
    with pytest.raises(Invalid, match="mode: must be"):
        decode(SlurmSpec, {"mode": mode})


@pytest.mark.parametrize("keys", [{"group": "ml"}, {"group": "ml", "mode": 700}])
def test_a_group_needs_a_mode_that_lets_it_in(keys: dict[str, object]) -> None:
    with pytest.raises(Invalid, match="group: must be given with a mode that lets the group in"):
        decode(SlurmSpec, keys)
    decode(SlurmSpec, {"group": "ml", "mode": 750})


@pytest.mark.parametrize("flag", ["--het-group=1", "--het-group 0,1", "--pack-group=1"])
def test_srun_options_of_heterogeneous_jobs_are_refused(flag: str) -> None:
    with pytest.raises(Invalid, match="heterogeneous job does not survive a lost node"):
        decode(SlurmSpec, {"srun_args": [flag]})
