"""Keys of a site: environment variables, file permissions and hooks on each node."""

import grp
import stat
from pathlib import Path

import pytest

from tests.slurm.e2e.slurm_job import SITE, SlurmNdctl, hosts_of, incidents

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.timeout(400)]

SHORT = {"train__steps": "8", "checkpoint__every_steps": "4"}


def modes(run_dir: Path) -> dict[str, int]:
    return {
        str(path.relative_to(run_dir)): stat.S_IMODE(path.stat().st_mode)
        for path in (run_dir, *run_dir.rglob("*"))
        if not path.is_symlink()
    }


def test_variables_reach_every_rank_and_the_group_reads_all_but_the_secret(
    finished: SlurmNdctl,
) -> None:
    environs = finished.read_rank_environ()
    assert len(environs) == 4
    assert all("SITE_SAYS=it is $HOME" in environ for environ in environs)
    for host in hosts_of(finished):
        output = (finished.run_dir / "logs" / f"hooks-{host}.log").read_text()
        assert output == '# before: echo "$SITE_SAYS"\nit is $HOME\n'
    found = modes(finished.run_dir)
    assert found.pop(".") == 0o2750
    assert found.pop("token") == 0o600
    closed = {name: oct(mode) for name, mode in found.items() if mode & 0o027 or not mode & 0o040}
    assert closed == {}, "the group can read, others cannot, and only the owner can write"
    assert {"metrics.jsonl", "checkpoints/step-24", "slurm/launch-1"} <= {*found}
    groups = {path.stat().st_gid for path in finished.run_dir.rglob("*")}
    assert groups == {grp.getgrnam(SITE["cluster__slurm__group"]).gr_gid}


@pytest.mark.slow
def test_a_node_whose_hook_fails_is_replaced_with_the_hooks_output_as_evidence(
    ndctl: SlurmNdctl, tmp_path: Path
) -> None:
    hook = "if [ $SLURMD_NODENAME = node2 ]; then echo no room on /scratch; exit 3; fi"
    cleaned = tmp_path / "cleaned"
    cleaned.mkdir()
    done = ndctl.submit(
        "--follow",
        cluster__spare_hosts="1",
        cluster__slurm__nodelist="node[1-3]",
        cluster__slurm__hooks__before=hook,
        cluster__slurm__hooks__after=f"touch {cleaned}/$SLURMD_NODENAME",
        **SHORT,
    )
    assert done.code == 0, done.out + done.err
    assert incidents(ndctl) == [("preflight", "node2", None)]
    (incident,) = ndctl.status()["incidents"]
    assert "before hook: exited with code 3; output: no room on /scratch" in incident["cause"]
    assert incident["failure"] == "before-hook"
    assert sorted(hosts_of(ndctl)) == ["node1", "node3"]
    ndctl.assert_nothing_left()
    assert sorted(path.name for path in cleaned.iterdir()) == ["node1", "node2", "node3"]
    assert "no strikes" in ndctl("hosts").out, "the hook itself may be wrong"


@pytest.mark.slow
def test_a_hook_that_fails_everywhere_ends_the_job_without_strikes(ndctl: SlurmNdctl) -> None:
    done = ndctl.submit("--follow", cluster__slurm__hooks__before="no-such-program", **SHORT)
    assert done.code == 1
    reason = ndctl.status()["reason"]
    assert reason.startswith("cluster.slurm.hooks.before failed on all 2 hosts on which it ran")
    assert (
        "exited with code 127; output: bash: line 1: no-such-program: command not found" in reason
    )
    assert "no strikes" in ndctl("hosts").out
    ndctl.assert_nothing_left()


@pytest.mark.slow
def test_a_hook_that_does_not_end_is_killed_and_only_its_node_is_replaced(
    ndctl: SlurmNdctl,
) -> None:
    """The hook hangs on the leader's node. The other agents wait for its leader until the hook's
    time limit."""
    done = ndctl.submit(
        cluster__spare_hosts="1",
        cluster__slurm__nodelist="node[1-3]",
        cluster__slurm__hooks__before="test $SLURM_NODEID != 0 || sleep 600",
        cluster__slurm__hooks__timeout="20",
        **SHORT,
    )
    assert done.code == 0, done.err
    ndctl.wait_for_end()
    assert incidents(ndctl) == [("preflight", "node1", None)]
    assert "timed out after 20 s" in ndctl.status()["incidents"][0]["cause"]
    assert sorted(hosts_of(ndctl)) == ["node2", "node3"]
    assert ndctl.slurm_job()["Restarts"] == "0"
    ndctl.assert_nothing_left()


def test_a_heterogeneous_job_ends_with_a_message(ndctl: SlurmNdctl, tmp_path: Path) -> None:
    done = ndctl("render", str(Path(__file__).parents[3] / "e2e" / "job.yaml"), "--backend=slurm")
    assert done.code == 0, done.err
    script, out = tmp_path / "job.sh", tmp_path / "said"
    script.write_text(done.out)
    ndctl.testbed.output_of(
        "sbatch", "--parsable", f"--output={out}", "-N2", ":", "-N1", str(script)
    )
    ndctl.testbed.wait_for("the message", lambda: out.exists() and "ndctl:" in out.read_text())
    assert "is heterogeneous: if it loses a node of its second component" in out.read_text()
    assert not ndctl.run_dir.exists()
    ndctl.testbed.wait_for("its end", lambda: not ndctl.testbed.output_of("squeue", "-h"))
