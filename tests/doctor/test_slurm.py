"""Doctor on Slurm, with settings of a real slurmctld (22.05) and from documentation of sites."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.contract.check_results import Finding
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.doctor.slurm import (
    COMMANDS,
    examine_slurm,
    judge_config,
    judge_partition,
    parse_version,
)
from orchestrator.inventory.slurm.config import parse_config
from orchestrator.inventory.slurm.partitions import parse_partitions
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock

CAPTURED = Path(__file__).parent.parent / "captured"
# Without the prolog that the captured cluster had, because `doctor` mentions it.
CONFIG = (CAPTURED / "slurm/22.05.8/config.txt").read_text().replace("/bin/true", "(null)")
PARTITIONS = (
    "PartitionName=train AllowGroups=ALL Default=YES MaxTime=UNLIMITED Nodes=node[1-2] State=UP\n"
    "PartitionName=long Default=NO MaxTime=7-00:00:00 Nodes=node2 State=DRAIN\n"
    "PartitionName=old Default=NO MaxTime=1:00:00 Nodes=node2 State=DOWN\n"
)
MOUNTS = "/dev/vda / ext4 rw 0 0\nfiler:/home /home nfs4 rw 0 0\n"


class Login:
    """A login node whose Slurm commands give configured answers."""

    def __init__(self, **answers: Completed | None) -> None:
        self.answers = answers

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        assert argv[0] in (*COMMANDS, "sacct")
        if list(argv[1:]) == ["--version"]:
            key = "version"
        else:
            key = argv[0] if argv[0] == "sacct" else argv[2]
        answer = {
            "version": Completed(0, "slurm-wlm 22.05.8\n", ""),
            "config": Completed(0, CONFIG, ""),
            "partitions": Completed(0, PARTITIONS, ""),
            **self.answers,
        }[key]
        if answer is None:
            raise TimeoutError
        return answer


def asked(login: Login) -> Slurm:
    return Slurm(login, TurnedClock())


def look(what: str, root: str = "/home/ada/runs", **answers: Completed | None) -> Finding:
    found = examine_slurm(Path(root), SlurmSpec(), asked(Login(**answers)), MOUNTS)
    return next(finding for finding in found if finding.what == what)


def settle(**settings: str) -> Mapping[str, Finding]:
    config = {"JobRequeue": "1", "KillWait": "30 sec", **settings}
    return {finding.what: finding for finding in judge_config(config, SlurmSpec())}


def test_a_healthy_cluster_has_no_problem() -> None:
    found = examine_slurm(Path("/home/ada/runs"), SlurmSpec(), asked(Login()), MOUNTS)
    assert [finding for finding in found if finding.verdict == "stops"] == []
    names = ["commands", "controller", "partition", "accounting", "requeue"]
    names += ["preemption", "kill wait", "dead nodes", "shared root"]
    assert [finding.what for finding in found] == names
    assert look("controller").found == "cluster tb, Slurm 22.05.8"
    assert look("dead nodes").found.startswith("Slurm detects one after 5 sec")
    assert (look("kill wait").verdict, look("kill wait").found[:3]) == ("warns", "6 s")


def test_a_stopped_munged_is_not_a_controller_that_is_down() -> None:
    said = (
        "scontrol: error: If munged is up, restart with --num-threads=10\n"
        'scontrol: error: Munge encode failed: Failed to access "/run/munge.sock": No such file or'
        " directory (Did you start munged?)\n"
    )
    found = look("controller", config=Completed(1, "", said))
    assert found.found.startswith("munged does not answer on this host")
    assert "systemctl start munge" in found.fix


def test_the_settings_of_a_real_slurmctld_are_read() -> None:
    config = parse_config(CONFIG)
    assert config["ClusterName"] == "tb"
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["SlurmdTimeout"] == "5 sec"
    assert config["AuthInfo"].endswith(",cred_expire=5")
    assert "RequeueExit" not in config, "(null) is no value"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm-wlm 22.05.8", (22, 5)),
        ("slurm 24.11.1", (24, 11)),
        ("slurm 25.05.0-0rc1", (25, 5)),
        ("nothing", None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


def test_missing_and_old_commands_are_reported() -> None:
    missing = look("commands", version=Completed(127, "", "No such file or directory: 'sbatch'"))
    assert missing.verdict == "stops"
    assert "No such file" in missing.found
    assert look("commands", version=Completed(0, "slurm 20.11.9", "")).verdict == "warns"


@pytest.mark.parametrize("answer", [None, Completed(1, "", "Unable to contact slurm controller")])
def test_a_controller_that_is_down_stops_the_job(answer: Completed | None) -> None:
    found = look("controller", config=answer)
    assert found.verdict == "stops"
    assert "scontrol ping" in found.fix


@pytest.mark.parametrize(
    ("name", "verdict", "found"),
    [
        ("", "ok", "train is UP, time limit UNLIMITED"),
        ("train", "ok", "train is UP, time limit UNLIMITED"),
        ("long", "stops", "long is DRAIN, time limit 7-00:00:00"),
        ("old", "stops", "old is DOWN, time limit 1:00:00"),
        ("gpu", "stops", "unknown partition gpu; partitions: train, long, old"),
        ("old,train", "ok", "train is UP, time limit UNLIMITED"),
        ("train,gpu", "stops", "unknown partition gpu; partitions: train, long, old"),
    ],
)
def test_the_partition_must_take_jobs(name: str, verdict: str, found: str) -> None:
    finding = judge_partition(tuple(filter(None, name.split(","))), parse_partitions(PARTITIONS))
    assert (finding.verdict, finding.found) == (verdict, found)


def test_a_cluster_without_a_default_partition_needs_one_in_the_spec() -> None:
    assert judge_partition((), ()).found == "no default partition; partitions: none"


def test_accounting_is_not_needed() -> None:
    assert look("accounting").verdict == "note"
    kept = CONFIG.replace("accounting_storage/none", "accounting_storage/slurmdbd")
    config = Completed(0, kept, "")
    assert look("accounting", config=config, sacct=Completed(0, "", "")).verdict == "ok"
    failed = look("accounting", config=config, sacct=Completed(1, "", "sacct: error: no dbd\n"))
    assert (failed.verdict, failed.found) == ("warns", "sacct: error: no dbd")


def test_effects_of_preemption_are_reported() -> None:
    signal = "enable_configless,preempt_send_user_signal"
    requeue = {"PreemptMode": "REQUEUE", "PreemptType": "preempt/partition_prio"}
    assert settle()["preemption"].verdict == "ok"
    assert settle(**requeue)["preemption"].verdict == "warns"
    assert settle(**requeue, SlurmctldParameters=signal)["preemption"].verdict == "ok"
    gang = settle(PreemptMode="GANG,SUSPEND", PreemptType="preempt/qos")["preemption"]
    assert (gang.verdict, "suspended" in gang.fix) == ("warns", True)


def test_time_limits_and_requeue_settings_are_reported() -> None:
    assert settle()["kill wait"].verdict == "ok"
    assert settle(KillWait="10 sec")["kill wait"].verdict == "warns"
    assert "wait time" not in settle(WaitTime="0 sec")
    assert "30 s" in settle(WaitTime="30 sec")["wait time"].found
    found = settle(JobRequeue="0", RequeueExit="211")["requeue"]
    assert (found.verdict, found.found) == ("note", "JobRequeue=0, RequeueExit=211")


def test_a_prolog_that_fails_must_not_hold_the_job() -> None:
    assert "prolog" not in settle()
    held = settle(Prolog="/etc/slurm/prolog.sh")["prolog"]
    assert (held.verdict, "scontrol release" in held.fix) == ("warns", True)
    parameters = "bf_interval=1,nohold_on_prolog_fail"
    settings = {"Prolog": "/etc/slurm/prolog.sh", "SchedulerParameters": parameters}
    assert settle(**settings)["prolog"].verdict == "ok"


def test_a_run_root_on_a_local_disk_is_reported() -> None:
    assert look("shared root").found == "/home/ada/runs is on nfs4"
    local = look("shared root", root="/tmp/runs")
    assert (local.verdict, local.found) == (
        "warns",
        "/tmp/runs is on ext4, which is local to this node",
    )


@pytest.mark.parametrize("warned", ["", "preempt_send_user_signal"])
def test_a_preemption_that_cancels_does_not_requeue_the_job(warned: str) -> None:
    """Without a GraceTime, the leader has no time to request a requeue, so the job is PREEMPTED."""
    found = settle(
        PreemptMode="CANCEL", PreemptType="preempt/partition_prio", SlurmctldParameters=warned
    )["preemption"]
    assert found.verdict == "warns"
    assert "ends as PREEMPTED and is not requeued" in found.found
    assert "PreemptMode=REQUEUE" in found.fix
    assert ("preempt_send_user_signal" in found.fix) == (not warned)
