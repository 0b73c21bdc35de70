"""Slurm's commands inside a container image. The outputs were captured on Slurm 22.05."""

from collections.abc import Sequence

import pytest

from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.on_nodes.container_commands import check_commands
from orchestrator.contract.spec.slurm_spec import ContainerSpec, SlurmSpec
from orchestrator.errors import CannotLead
from orchestrator.seams import Completed, Shell
from tests.agent.world import TurnedClock
from tests.backends.slurm.slurm_launch import FakeSlurm, a_launch

NO_PROGRAM = Completed(127, "", "[Errno 2] No such file or directory: 'scontrol'")
NO_LIBRARY = Completed(
    127, "", "srun: error while loading shared libraries: libslurmfull.so: cannot open\n"
)
DOWN = "Slurmctld(primary) at vm is DOWN\n"
NO_MUNGE = Completed(
    1,
    DOWN,
    "scontrol: error: If munged is up, restart with --num-threads=10\n"
    'scontrol: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such'
    " file or directory (Did you start munged?)\n",
)
NO_CONF = Completed(
    1,
    "",
    "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "scontrol: fatal: Could not establish a configuration source\n",
)
NO_FILE = Completed(
    1,
    "",
    "scontrol: error: s_p_parse_file: cannot stat file /etc/slurm/slurm.conf: No such file or"
    " directory, retrying in 1sec up to 60sec\nscontrol: error: ClusterName needs to be specified\n"
    "scontrol: fatal: Unable to process configuration file\n",
)
NO_USER = Completed(1, "", "scontrol: error: Invalid user for SlurmUser slurm, ignored\n")


def image(ping: Completed | None, srun: Completed | None = None) -> Shell:
    """A shell in an image, with the answers of `scontrol ping` and srun. None: it times out."""

    def run(argv: Sequence[str], /, *, timeout: float) -> Completed:
        done = ping if argv[0] == "scontrol" else srun or Completed(0, "slurm-wlm 22.05.8\n", "")
        if done is None:
            raise TimeoutError("scontrol did not end within 75 s")
        return done

    return run


@pytest.mark.parametrize(
    ("ping", "message"),
    [
        (NO_PROGRAM, "No such file or directory"),
        (NO_LIBRARY, "loading shared libraries"),
        (NO_MUNGE, "Munge encode failed"),
        (NO_CONF, "a configuration source"),
        (NO_FILE, "cannot stat file /etc/slurm/slurm.conf"),
        (NO_USER, "SlurmUser"),
    ],
)
def test_an_image_without_what_slurms_commands_need_is_refused(
    ping: Completed, message: str
) -> None:
    with pytest.raises(CannotLead, match="do not work in the container") as refused:
        check_commands(image(ping))
    assert message in refused.value.message
    assert "/run/munge:/run/munge" in refused.value.fix


def test_srun_is_needed_as_well() -> None:
    with pytest.raises(CannotLead, match="`srun --version`"):
        check_commands(image(Completed(0, "", ""), NO_LIBRARY))


@pytest.mark.parametrize("ping", [None, Completed(1, DOWN, "")])
def test_a_slurmctld_that_is_down_is_not_the_images_fault(ping: Completed | None) -> None:
    check_commands(image(ping))


def test_the_leader_checks_commands_only_inside_a_container() -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node1"}
    slurm = FakeSlurm(intercept=lambda argv, before: NO_MUNGE, max_timeout=80.0)
    backend = SlurmBackend(inside, TurnedClock(), slurm)
    contained = SlurmSpec(container=ContainerSpec(image="a.sqsh"))
    with pytest.raises(CannotLead):
        backend.allocation(a_launch(slurm=contained))
    assert backend.allocation(a_launch()) is not None
