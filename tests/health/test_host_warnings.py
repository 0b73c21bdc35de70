"""What a host warns of while its ranks train, with outputs in NVIDIA's documentation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from orchestrator.health.host_warnings import (
    FLAPS,
    FLAPS_WITHIN_S,
    THROTTLED_LOOKS,
    WATCH_S,
    HostWatch,
    Warned,
    parse_throttled,
)
from orchestrator.seams import Completed

DOCUMENTED = Path(__file__).parent / "documented"
GPUS = (DOCUMENTED / "nvidia-smi-query-gpu.csv").read_text()
REMAPPED = (DOCUMENTED / "nvidia-smi-query-remapped-rows.csv").read_text()
DMESG = (DOCUMENTED / "dmesg-xid.txt").read_text()
WELL = (
    "00000000:07:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]\n00000000:0F:00.0, NVIDIA H100, 0, [N/A]\n"
)
SLOW = "00000000:0F:00.0, Active, Not Active\n00000000:07:00.0, Not Active, Not Active\n"
FAST = SLOW.replace("0F:00.0, Active", "0F:00.0, Not Active")


class Host:
    """A host whose programs print what `answers` has; a test changes that between two looks."""

    def __init__(self, root: Path, **answers: str) -> None:
        self.root = root
        self.answers: dict[str, str | None] = {"query-gpu=pci.bus_id,name": WELL, **answers}
        self.watch = HostWatch(root, self)
        self.now = 0.0

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        assert timeout > 0
        key = next((key for key in self.answers if key in " ".join(argv)), None)
        if key is None:
            return Completed(127, "", "no such program")
        if (answer := self.answers[key]) is None:
            raise TimeoutError
        return Completed(0, answer, "")

    def look(self) -> tuple[Warned, ...]:
        self.now += WATCH_S
        return self.watch(self.now)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: …\n")
    return Host(tmp_path)


def counter(root: Path, port: str, lost: int) -> None:
    path = root / "sys/class" / port
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{lost}\n")


IB = "infiniband/mlx5_0/ports/1/counters/link_downed"


def test_what_was_so_at_the_first_look_is_no_warning(host: Host) -> None:
    host.answers |= {"query-gpu=pci.bus_id,name": GPUS, "remapped-rows": REMAPPED, "dmesg": DMESG}
    assert host.look() == ()
    assert host.look() == ()


def test_new_memory_errors_are_reported_once(host: Host) -> None:
    assert host.look() == ()
    host.answers |= {"query-gpu=pci.bus_id,name": GPUS, "remapped-rows": REMAPPED}
    assert [(one.kind, one.what) for one in host.look()] == [
        ("gpu-memory", "GPU 0000:0f:00: uncorrected memory errors"),
        ("gpu-memory", "GPU 0000:47:00: memory pages are to be retired"),
        ("gpu-memory", "GPU 0000:0f:00: rows are pending to be remapped: reset the GPU"),
        ("gpu-memory", "GPU 0000:47:00: a row could not be remapped: replace the GPU"),
    ]
    assert host.look() == ()


def test_new_xids_of_the_hosts_own_gpus_are_reported(host: Host) -> None:
    host.answers["dmesg"] = DMESG.splitlines()[0]
    assert host.look() == ()
    host.answers["dmesg"] = DMESG
    # 79 is of a GPU that the job does not have, and 31 is of a program.
    assert host.look() == (
        Warned("gpu-memory", "GPU 0000:0f:00: Xid 95, uncontained memory error"),
    )
    assert host.look() == ()


@pytest.mark.parametrize(("xid", "kind"), [(63, "gpu-memory"), (94, "gpu-memory"), (79, "gpu")])
def test_xids_after_which_a_gpu_goes_on_warn_too(host: Host, xid: int, kind: str) -> None:
    host.look()
    host.answers["dmesg"] = f"[  100.5] NVRM: Xid (PCI:0000:0f:00): {xid}, pid=1, name=python\n"
    assert [one.kind for one in host.look()] == [kind]


@pytest.mark.parametrize("bus_id", [":::::", "03:00", "0000:0f", "0f"])
def test_a_line_of_the_kernel_log_without_a_bus_id_is_skipped(host: Host, bus_id: str) -> None:
    host.look()
    host.answers["dmesg"] = f"[  100.5] NVRM: Xid (PCI:{bus_id}): 79, pid=1, name=python\n"
    assert host.look() == ()


def test_throttling_that_lasts_is_reported_and_its_end_too(host: Host) -> None:
    host.answers["clocks_throttle"] = FAST
    host.look()
    host.answers["clocks_throttle"] = SLOW
    seen = [host.look() for _ in range(THROTTLED_LOOKS)]
    assert seen[:-1] == [()] * (THROTTLED_LOOKS - 1)
    assert seen[-1] == (Warned("throttling", "GPU 0000:0f:00 slows down: it is too hot"),)
    assert host.look() == ()
    host.answers["clocks_throttle"] = FAST
    (over,) = host.look()
    assert (over.kind, over.lasts) == ("throttling", False)
    assert host.look() == ()


def test_throttling_that_comes_and_goes_is_no_warning(host: Host) -> None:
    host.look()
    for text in (SLOW, SLOW, FAST) * THROTTLED_LOOKS:
        host.answers["clocks_throttle"] = text
        assert host.look() == ()


@pytest.mark.parametrize("port", [IB, "net/eth0/carrier_down_count"])
def test_a_link_that_is_lost_again_and_again_is_reported_once(host: Host, port: str) -> None:
    (host.root / "sys/class/net/eth0/device").mkdir(parents=True)
    counter(host.root, port, 7)
    assert host.look() == ()
    for lost in range(1, FLAPS):
        counter(host.root, port, 7 + lost)
        assert host.look() == ()
    counter(host.root, port, 7 + FLAPS)
    (found,) = host.look()
    assert found.kind == "links"
    assert ("mlx5_0/1" if port == IB else "eth0") in found.what
    counter(host.root, port, 8 + FLAPS)
    assert host.look() == ()


def test_losses_that_one_look_sees_at_once_count_each(host: Host) -> None:
    counter(host.root, IB, 0)
    host.look()
    counter(host.root, IB, FLAPS)
    assert [one.kind for one in host.look()] == ["links"]


def test_a_link_that_is_lost_now_and_then_is_no_warning(host: Host) -> None:
    counter(host.root, IB, 0)
    host.look()
    for lost in range(1, 10):
        host.now += FLAPS_WITHIN_S / 2
        counter(host.root, IB, lost)
        assert host.look() == ()


def test_a_counter_that_starts_again_at_zero_is_no_loss(host: Host) -> None:
    counter(host.root, IB, 50)
    host.look()
    counter(host.root, IB, 0)
    assert host.look() == ()


def test_virtual_interfaces_do_not_count(host: Host) -> None:
    counter(host.root, "net/veth1/carrier_down_count", 0)
    host.look()
    counter(host.root, "net/veth1/carrier_down_count", 9)
    assert host.look() == ()


@pytest.mark.parametrize("answers", [{}, {"nvidia-smi": None, "dmesg": None}])
def test_a_host_that_cannot_say_warns_of_nothing(
    tmp_path: Path, host: Host, answers: Mapping[str, str | None]
) -> None:
    host.answers = dict(answers)
    assert (host.look(), host.look()) == ((), ())
    bare = Host(tmp_path / "without")
    assert (bare.look(), bare.look()) == ((), ())


@pytest.mark.parametrize("text", ["", "No devices were found\n", "a, b\n", "[N/A], Active, Active"])
def test_other_lines_are_skipped(text: str) -> None:
    assert parse_throttled(text) == {}


def test_all_reasons_are_named() -> None:
    found = parse_throttled("00000000:0F:00.0, Active, Active\n00000000:07:00.0, [N/A], [N/A]\n")
    assert found == {"0000:0f:00": "it is too hot, the power supply demands it"}
