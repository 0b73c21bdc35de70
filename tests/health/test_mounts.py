from pathlib import Path

import pytest

from orchestrator.health.mounts import doubt, mount_of, read_mounts

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
fs:/home /home nfs4 rw,vers=4.2,rsize=1048576,local_lock=none,addr=10.0.0.1 0 0
fs:/old /home/old nfs rw,vers=3,mountproto=udp,local_lock=none,addr=10.0.0.1 0 0
fs:/fast /fast nfs rw,vers=3,nolock,local_lock=all,addr=10.0.0.1 0 0
fs:/four /four nfs4 rw,vers=4.1,local_lock=flock 0 0
10.0.0.2@o2ib:/lfs /lustre lustre rw,flock,user_xattr 0 0
10.0.0.2@o2ib:/lfs /my\\040lustre lustre rw,localflock,user_xattr 0 0
//win/share /win cifs rw,vers=3.1.1 0 0
tmpfs /covered tmpfs rw 0 0
fs:/fast /covered nfs4 rw,nolock 0 0
"""


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("/tmp/runs", None),
        ("/home/me", None),
        ("/homes/me", None),
        ("/home/old/me", "NFS 3, which keeps"),
        ("/fast/runs", "local to each host"),
        ("/four/runs", "local to each host"),
        ("/lustre/runs", None),
        ("/my lustre/runs", "local to each host"),
        ("/win", "cannot be read"),
        ("/covered", "local to each host"),
    ],
)
def test_mount_options_show_whether_locks_work_between_hosts(place: str, found: str | None) -> None:
    doubted = doubt(MOUNTS, Path(place))
    assert (doubted is None) == (found is None)
    if doubted is not None and found is not None:
        assert found in doubted[0]
        assert "NFS" in doubted[1] or "mount it" in doubted[1]


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/data/x", "lustre"),
        ("/database", "ext4"),
        ("/my\tdata/x", "beegfs"),
        ("/a\x85b", "xfs"),
        ("/\udcff/x", "tmpfs"),
    ],
)
def test_the_deepest_and_latest_mount_counts(place: str, kind: str) -> None:
    mounts = (
        "a / ext4 rw 0 0\nc /data nfs4 rw 0 0\nd /data lustre rw 0 0\n"
        "e /my\\011data beegfs rw 0 0\nf /a\x85b xfs rw 0 0\ng /\udcff tmpfs rw 0 0\n"
    )
    found = mount_of(mounts, Path(place))
    assert found is not None
    assert found.kind == kind


def test_this_machines_own_mounts_can_be_read(tmp_path: Path) -> None:
    mounts = read_mounts()
    assert mount_of(mounts, tmp_path.resolve()) is not None
    assert mount_of("", tmp_path) is None
    assert doubt("", tmp_path) is None
