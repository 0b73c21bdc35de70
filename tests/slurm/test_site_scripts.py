"""slurm/prolog.sh, epilog.sh and healthcheck.sh as a site installs them, on real daemons.

All nodes of a testbed share one machine. Each node therefore has its own root with GPUs that are
files, and an nvidia-smi that lists them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.job import processes_of, wait_for
from tests.slurm.e2e.slurm_job import SlurmNdctl, hosts_of
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(400)]

SLURM = Path(__file__).parents[2] / "slurm"
GPUS = ("00000000:17:00.0, NVIDIA H100, 0, [N/A]", "00000000:2A:00.0, NVIDIA H100, 0, [N/A]")
HEALTH_S = 3
SETTINGS = """Prolog={folder}/prolog
Epilog={folder}/epilog
HealthCheckProgram={folder}/healthcheck
HealthCheckInterval={seconds}
HealthCheckNodeState=ANY,CYCLE
SchedulerParameters=bf_interval=1,sched_interval=2,nohold_on_prolog_fail"""


@dataclass
class Site:
    """A cluster on which the scripts are installed."""

    folder: Path
    slurm: SlurmTestbed

    def has_gpus(self, node: str, count: int) -> None:
        (self.folder / node / "gpus").write_text("".join(f"{gpu}\n" for gpu in GPUS[:count]))

    def reason(self, node: str) -> str:
        """The drain reason of a node; empty if it is not drained."""
        shown = self.slurm.output_of("scontrol", "show", "node", "-o", node)
        if "DRAIN" not in shown.partition(" State=")[2].split()[0]:
            return ""
        return shown.partition(" Reason=")[2].partition(" [")[0]

    def health_checks(self) -> list[str]:
        """Command lines of those that run now."""
        return [line for line in processes_of(self.folder).values() if "healthcheck" in line]

    def queue(self, *options: str, shell: str = "srun hostname") -> str:
        out = f"--output={self.folder}/%j.out"
        asked = ("--exclusive", "--requeue", out, *options, f"--wrap={shell}")
        return self.slurm.output_of("sbatch", "--parsable", *asked)

    def slurm_job(self, job: str) -> dict[str, str]:
        words = self.slurm.output_of("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: str) -> dict[str, str]:
        self.slurm.wait_for("its end", lambda: self.slurm_job(job)["JobState"] == "COMPLETED", 120)
        return self.slurm_job(job)


def install(folder: Path) -> None:
    """Installs the three scripts; a line before each sets the node's root."""
    for number in range(1, 5):
        root = folder / f"node{number}"
        for name in ("bin", "dev/shm", "tmp", "etc", "run", "proc"):
            (root / name).mkdir(parents=True)
        for address in ("0000:17:00.0", "0000:2a:00.0"):
            (root / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        (root / "proc/uptime").write_text("5000.00 9000.00\n")
        smi = root / "bin" / "nvidia-smi"
        smi.write_text(
            f"#!/bin/sh\ncase $1 in --query-gpu=*) cat {root}/gpus ;; *) exit 1 ;; esac\n"
        )
        smi.chmod(0o755)
        (root / "bin" / "dmesg").write_text("#!/bin/sh\nexit 1\n")
        (root / "bin" / "dmesg").chmod(0o755)
        settings = f"PATH={root}/bin:$PATH\nexport SLURM_CONF={folder}/slurm.conf\n"
        (root / "etc/ndctl-host-checks.conf").write_text(settings)
    for name in ("prolog", "epilog", "healthcheck"):
        script = folder / name
        own = f"{folder}/${{SLURMD_NODENAME:-$(hostname -s)}}"
        script.write_text(f"#!/bin/bash\nexport NDCTL_ROOT={own}\nexec {SLURM}/{name}.sh\n")
        script.chmod(0o755)


@pytest.fixture(scope="module")
def installed(slurm_available: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    install(folder)
    for number in range(1, 5):
        (folder / f"node{number}" / "gpus").write_text("\n".join(GPUS) + "\n")
    knobs = {"TB_EXTRA": SETTINGS.format(folder=folder, seconds=HEALTH_S)}
    with running_testbed(nodes=4, gpus=2, knobs=knobs) as testbed:
        (folder / "slurm.conf").symlink_to(testbed.folder / "etc" / "slurm.conf")
        yield Site(folder, testbed)


@pytest.fixture
def site(installed: Site) -> Site:
    for node in installed.slurm.names:
        installed.has_gpus(node, 2)
    installed.slurm.restore()
    return installed


@pytest.fixture
def site_without_health_check(site: Site) -> Iterator[Site]:
    """A site whose health check does nothing, so that only the prolog finds faults."""
    script = site.folder / "healthcheck"
    text = script.read_text()
    script.write_text("#!/bin/sh\n")
    # On a busy machine, checks that began before may last until the test has broken a node.
    site.slurm.wait_for("the last health checks", lambda: not site.health_checks())
    yield site
    script.write_text(text)


def test_healthy_nodes_get_jobs(site: Site) -> None:
    assert site.ended(site.queue("-N4"))["Restarts"] == "0"
    assert [site.reason(node) for node in site.slurm.names] == [""] * 4


def test_a_node_whose_prolog_fails_is_drained_and_slurm_runs_the_job_elsewhere(
    site_without_health_check: Site,
) -> None:
    site = site_without_health_check
    site.has_gpus("node1", 1)
    job = site.ended(site.queue("-N2"))
    assert job["Restarts"] == "1"
    assert "node1" not in job["NodeList"]
    assert site.reason("node1") == "ndctl: prolog: 1 of 2 GPUs"
    assert "ndctl: prolog:" in site.slurm.output_of("sinfo", "-R")


def test_a_node_that_breaks_under_a_job_is_drained_when_the_job_ends(
    site_without_health_check: Site,
) -> None:
    site = site_without_health_check
    job = site.queue("-N1", "-w", "node3", shell="sleep 5")
    site.slurm.wait_for("the job", lambda: site.slurm_job(job)["JobState"] == "RUNNING")
    site.slurm.wait_for("its step", lambda: (site.folder / f"{job}.out").exists())
    site.has_gpus("node3", 1)
    assert site.ended(job)["Restarts"] == "0", "the job has ended and is not requeued"
    site.slurm.wait_for("the epilog", lambda: site.reason("node3"), 60)
    assert site.reason("node3") == f"ndctl: epilog of job {job}: 1 of 2 GPUs"


def test_the_health_check_drains_a_busy_node_and_keeps_an_administrators_reason(site: Site) -> None:
    site.slurm.output_of("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=bad-cable")
    job = site.queue("-N1", "-w", "node4", shell="sleep 12")
    # A RUNNING job may still be in its prolog, which would find the same fault.
    site.slurm.wait_for("its step", lambda: (site.folder / f"{job}.out").exists())
    for node in ("node2", "node4"):
        site.has_gpus(node, 1)
    site.slurm.wait_for("the health check", lambda: site.reason("node4"), 60)
    assert site.reason("node4") == "ndctl: health check: 1 of 2 GPUs"
    assert site.ended(job)["Restarts"] == "0"
    assert site.reason("node2") == "bad-cable"
    assert site.reason("node1") == ""

    site.has_gpus("node4", 2)
    site.slurm.output_of("scontrol", "update", "NodeName=node4", "State=RESUME")
    assert site.reason("node4") == "", "a person resumes the node after the repair; no script does"


@pytest.mark.slow
def test_a_job_of_ndctl_trains_elsewhere_where_the_prolog_finds_a_broken_node(
    site_without_health_check: Site, tmp_path: Path
) -> None:
    site = site_without_health_check
    ndctl = SlurmNdctl(tmp_path / "runs", site.slurm)
    site.has_gpus("node1", 1)
    done = ndctl.submit("--follow", train__steps="8")
    assert done.code == 0, done.out + done.err
    assert "node1" not in hosts_of(ndctl)
    assert site.reason("node1") == "ndctl: prolog: 1 of 2 GPUs"
    assert ndctl.slurm_job()["Restarts"] == "1"
    assert (ndctl.status()["restarts"], ndctl.status()["incidents"]) == (0, [])
    wait_for(lambda: not site.slurm.output_of("squeue", "-h"), "Slurm to be done with it", 120)
    ndctl.assert_nothing_left()
