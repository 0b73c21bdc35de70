"""Checks of a host, which is a tree of files that the test writes."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding, Verdict, troubles, why_unfit
from orchestrator.health.clocks_and_names import addresses_of, clock_skew, name_resolves
from orchestrator.health.host_check import Sight, Wanted, examine_host, sight
from orchestrator.health.links import examine_links
from orchestrator.seams import Completed
from orchestrator.system import run_command
from tests.kubernetes.standins.containers import why_no_containers

GIB = 1 << 30


def no_programs(argv: Sequence[str], /, *, timeout: float) -> Completed:
    return Completed(127, "", f"no {argv[0]}")


def a_sight(root: Path, **more: object) -> Sight:
    (root / "tmp").mkdir(exist_ok=True)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    seen = Sight(
        shell=no_programs,
        root=root,
        scratch=root / "tmp",
        name="node1",
        free=lambda _: 100 * GIB,
        resolve=lambda _: ("10.0.0.1",),
        owns=lambda address: address == "10.0.0.1",
    )
    return replace(seen, **more)


def wanted(root: Path, address: str = "10.0.0.1", devices: int = 2) -> Wanted:
    return Wanted(devices=devices, run_dir=root / "run", address=address)


def look(
    root: Path,
    what: str,
    environ: Mapping[str, str] | None = None,
    address: str = "10.0.0.1",
    **more: object,
) -> Finding:
    found = examine_host(wanted(root, address), environ or {}, a_sight(root, **more))
    return next(finding for finding in found if finding.what == what)


def free_at(place: Path, count: int) -> Callable[[Path], int]:
    return lambda path: count if path == place else 100 * GIB


def test_a_healthy_host_has_no_finding(tmp_path: Path) -> None:
    found = examine_host(wanted(tmp_path), {}, a_sight(tmp_path))
    assert troubles(found) == ()
    assert [f.what for f in found] == ["gpus", "/dev/shm", "run dir", "scratch", "own name"]


def test_this_very_machine_is_fit(tmp_path: Path) -> None:
    here = Wanted(devices=1, run_dir=tmp_path, address="127.0.0.1")
    assert why_unfit(examine_host(here, {}, sight(run_command))) is None


def test_only_findings_that_stop_a_job_make_a_host_unfit() -> None:
    findings = [
        Finding(what="own name", verdict="warns", found="no address"),
        Finding(what="gpus", verdict="stops", found="1 granted, 2 needed"),
        Finding(what="scratch", verdict="stops", found="full", fix="make room"),
    ]
    assert why_unfit(findings) == "gpus: 1 granted, 2 needed; scratch: full (make room)"
    assert why_unfit(findings[:1]) is None


@pytest.mark.parametrize(
    ("free", "driver", "verdict"),
    [
        (2 * GIB, True, "ok"),
        (GIB // 2, True, "warns"),
        (1 << 20, False, "warns"),
        (1 << 20, True, "stops"),
        ((1 << 20) - 1, False, "stops"),
    ],
)
def test_gpus_need_shared_memory_and_all_ranks_a_little(
    tmp_path: Path, free: int, driver: bool, verdict: Verdict
) -> None:
    if driver:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text("")
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev/nvidia0").write_text("")
    found = look(tmp_path, "/dev/shm", free=free_at(tmp_path / "dev/shm", free))
    assert found.verdict == verdict


NO_SHM = """
import sys
from pathlib import Path
from orchestrator.health.host_check import Wanted, examine_host, sight
from orchestrator.system import run_command
here = Wanted(devices=1, run_dir=Path(sys.argv[1]), address="127.0.0.1")
found = examine_host(here, {}, sight(run_command))
print(*(f"{it.verdict}: {it.found}" for it in found if it.what == "/dev/shm"))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("mounted", "found"),
    [
        (
            "mount -t tmpfs -o size=4k shm /dev/shm && head -c 4096 /dev/zero > /dev/shm/full",
            "stops: not writable: No space left on device",
        ),
        (
            "mount -t tmpfs -o ro shm /dev/shm",
            "stops: not writable: Read-only file system",
        ),
        (
            "mount -t tmpfs shm /dev",
            "stops: not writable: No such file or directory",
        ),
        (
            "mount -t tmpfs -o size=64m shm /dev/shm",
            "warns: 64 MiB free in /dev/shm, 1024 MiB recommended",
        ),
    ],
    ids=["full", "read-only", "missing", "small"],
)
def test_without_semaphores_a_host_is_unfit(tmp_path: Path, mounted: str, found: str) -> None:
    """Also for ranks on CPUs, because the agent forks them and uses multiprocessing's queues."""
    if (why := why_no_containers()) is not None:
        pytest.skip(why)
    script = f'{mounted} && exec "$@"'
    python = (sys.executable, "-c", NO_SHM, str(tmp_path))
    namespace = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    ran = subprocess.run([*namespace, *python], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith(found), ran.stderr
    semaphore = (sys.executable, "-c", "import multiprocessing; multiprocessing.Event()")
    made = subprocess.run([*namespace, *semaphore], capture_output=True, check=False)
    assert (made.returncode == 0) is found.startswith("warns")


def test_a_full_run_directory_is_a_warning_because_all_hosts_share_it(tmp_path: Path) -> None:
    found = look(tmp_path, "run dir", free=free_at(tmp_path / "run", 5 << 20))
    assert (found.verdict, found.found) == ("warns", f"5 MiB free for {tmp_path}/run")


def test_a_run_directory_that_is_not_mounted_stops(tmp_path: Path) -> None:
    def free(path: Path) -> int:
        if path == tmp_path / "run":
            raise FileNotFoundError(2, "No such file or directory")
        return 100 * GIB

    assert look(tmp_path, "run dir", free=free).verdict == "stops"


def test_scratch_must_have_room_and_be_writable(tmp_path: Path) -> None:
    full = look(tmp_path, "scratch", free=free_at(tmp_path / "tmp", 1 << 20))
    assert (full.verdict, full.found) == ("stops", f"1 MiB free in {tmp_path}/tmp")
    assert look(tmp_path, "scratch", scratch=tmp_path / "gone").verdict == "stops"


def unknown(name: str) -> tuple[str, ...]:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("resolve", "address", "environ", "verdict", "found"),
    [
        (lambda _: ("10.0.0.1",), "10.0.0.1", {}, "ok", "node1 resolves to 10.0.0.1"),
        (unknown, "10.0.0.1", {}, "warns", "node1 has no address"),
        (unknown, "127.0.0.1", {}, "note", "node1 has no address"),
        (lambda _: ("10.9.9.9",), "10.0.0.1", {}, "warns", "10.9.9.9, which is not this host"),
        (lambda _: ("127.0.1.1",), "10.0.0.1", {}, "warns", "which other hosts cannot reach"),
        (lambda _: ("127.0.1.1",), "127.0.1.1", {}, "ok", "node1 resolves to 127.0.1.1"),
        (
            lambda _: ("127.0.1.1",),
            "10.0.0.1",
            {"GLOO_SOCKET_IFNAME": "eth0"},
            "note",
            "which other hosts cannot reach",
        ),
    ],
)
def test_a_host_must_resolve_its_own_name(
    tmp_path: Path,
    resolve: Callable[[str], tuple[str, ...]],
    address: str,
    environ: dict[str, str],
    verdict: Verdict,
    found: str,
) -> None:
    def owns(address: str) -> bool:
        return address in ("10.0.0.1", "127.0.1.1")

    finding = look(tmp_path, "own name", environ, address, resolve=resolve, owns=owns)
    assert finding.verdict == verdict
    assert found in finding.found


def test_a_check_that_hangs_is_abandoned(tmp_path: Path) -> None:
    released = threading.Event()

    def hangs(name: str) -> tuple[str, ...]:
        released.wait(20)
        return ()

    found = examine_host(wanted(tmp_path), {}, a_sight(tmp_path, resolve=hangs), limit_s=0.05)
    released.set()
    assert (why_unfit(found) or "").startswith("preflight: the checks timed out after 0 s")


def test_a_failing_check_does_not_pass_a_host(tmp_path: Path) -> None:
    def broken(name: str) -> tuple[str, ...]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        examine_host(wanted(tmp_path), {}, a_sight(tmp_path, resolve=broken))


# Ports


def port(root: Path, name: str, state: str) -> None:
    folder = root / "sys/class/infiniband" / name / "ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


def card(root: Path, name: str, operstate: str, flags: str, device: bool = True) -> None:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{operstate}\n")
    (folder / "flags").write_text(f"{flags}\n")
    if device:
        (folder / "device").mkdir()


def test_a_port_that_is_not_active_is_reported(tmp_path: Path) -> None:
    assert list(examine_links(tmp_path)) == []
    port(tmp_path, "mlx5_0", "4: ACTIVE")
    (found,) = examine_links(tmp_path)
    assert (found.verdict, found.found) == ("ok", "1 ports active")
    port(tmp_path, "mlx5_1", "1: DOWN")
    port(tmp_path, "mlx5_2", "2: INIT")
    (found,) = examine_links(tmp_path)
    assert found.verdict == "warns"
    assert found.found == "1 of 3 ports active: mlx5_1/1 DOWN, mlx5_2/1 INIT"


def test_a_card_that_is_switched_on_must_have_a_link(tmp_path: Path) -> None:
    card(tmp_path, "lo", "unknown", "0x9", device=False)
    card(tmp_path, "eth1", "down", "0x1002")  # nobody wants it
    assert list(examine_links(tmp_path)) == []
    card(tmp_path, "eth0", "up", "0x1003")
    (found,) = examine_links(tmp_path)
    assert (found.verdict, found.found) == ("ok", "eth0 up")
    card(tmp_path, "ib0", "down", "0x1003")
    (found,) = examine_links(tmp_path)
    assert (found.verdict, found.found) == ("warns", "ib0 enabled but without a link")


# The leader's side


@pytest.mark.parametrize(
    ("sent_at", "found"),
    [
        (1000.0, None),
        (996.0, None),
        (990.0, "node1 is 10.0 s behind the leader (limit 5 s)"),
        (1012.5, "node1 is 12.5 s ahead of the leader (limit 5 s)"),
    ],
)
def test_clocks_too_far_apart_are_reported(sent_at: float, found: str | None) -> None:
    finding = clock_skew("node1", sent_at, 1000.0)
    assert (finding.found if finding else None) == found
    assert clock_skew("node1", sent_at, 1000.0, limit_s=60.0) is None


@pytest.mark.parametrize(
    ("resolve", "address", "found"),
    [
        (lambda _: ("10.0.0.1",), "10.0.0.1", None),
        (lambda _: ("10.0.0.1",), "10.1.0.1", None),
        (lambda _: ("127.0.1.1",), "127.0.1.1", None),
        (lambda _: ("127.0.1.1",), "10.0.0.1", "node1 resolves to 127.0.1.1 on"),
        (unknown, "10.0.0.1", "cannot resolve node1"),
    ],
)
def test_each_host_must_resolve_the_name_of_the_other(
    resolve: Callable[[str], tuple[str, ...]], address: str, found: str | None
) -> None:
    finding = name_resolves("node1", address, resolve, "node2")
    assert (finding is None) is (found is None)
    if finding is not None and found is not None:
        assert finding.verdict == "warns"
        assert found in finding.found
        assert "node2" in finding.found


def test_the_real_name_service_is_asked() -> None:
    assert "127.0.0.1" in addresses_of("localhost")
