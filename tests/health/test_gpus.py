"""Checks of GPUs, with the outputs in NVIDIA's documentation and of an H200."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from orchestrator.contract.check_results import Finding, why_unfit
from orchestrator.health.gpus import (
    Gpu,
    Xid,
    examine_devices,
    granted,
    judge_xids,
    parse_gpus,
    parse_remapped,
    parse_xids,
)
from orchestrator.seams import Completed

DOCUMENTED = Path(__file__).parent / "documented"
GPUS = (DOCUMENTED / "nvidia-smi-query-gpu.csv").read_text()
REMAPPED = (DOCUMENTED / "nvidia-smi-query-remapped-rows.csv").read_text()
DMESG = (DOCUMENTED / "dmesg-xid.txt").read_text()


class Host:
    """A host with configured answers. A program without an answer is not installed, and a program
    with the answer None hangs.
    """

    def __init__(self, root: Path, answers: Mapping[str, Completed | None]) -> None:
        self.root = root
        self.answers = answers

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        assert timeout > 0
        key = next((key for key in self.answers if key in " ".join(argv)), None)
        if key is None:
            return Completed(127, "", "no such program")
        answer = self.answers[key]
        if answer is None:
            raise TimeoutError
        return answer

    def look(self, wanted: int, environ: Mapping[str, str] | None = None) -> list[Finding]:
        return list(examine_devices(wanted, environ or {}, self.root, self))


def a_root(folder: Path, gpus: int, driver: bool = True) -> Path:
    (folder / "dev").mkdir()
    (folder / "proc/driver/nvidia").mkdir(parents=True)
    (folder / "proc/uptime").write_text("90000.0 1.0\n")
    if driver:
        (folder / "proc/driver/nvidia/version").write_text("NVRM version: …\n")
    for number in range(gpus):
        (folder / f"dev/nvidia{number}").write_text("")
    (folder / "dev/nvidiactl").write_text("")
    return folder


def healthy(gpus: int = 8) -> dict[str, Completed | None]:
    rows = [f"00000000:{bus:02X}:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]" for bus in range(gpus)]
    remapped = [f"00000000:{bus:02X}:00.0, No, No" for bus in range(gpus)]
    return {
        "--query-gpu": Completed(0, "\n".join(rows), ""),
        "--query-remapped-rows": Completed(0, "\n".join(remapped), ""),
        "dmesg": Completed(0, "[    0.000000] Linux version 6.1\n", ""),
    }


def test_gpus_are_read_from_nvidia_smi() -> None:
    assert parse_gpus(GPUS) == (
        Gpu(bus_id="0000:07:00", name="NVIDIA H100 80GB HBM3", uncorrected=0, pages_pending=False),
        Gpu(bus_id="0000:0f:00", name="NVIDIA H100 80GB HBM3", uncorrected=3, pages_pending=False),
        Gpu(bus_id="0000:47:00", name="Tesla V100-SXM2-32GB", uncorrected=0, pages_pending=True),
        Gpu(
            bus_id="0000:4e:00",
            name="NVIDIA GeForce RTX 4090",
            uncorrected=None,
            pages_pending=False,
        ),
    )
    assert parse_gpus("No devices were found\n") == ()
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate, a, b, c") == ()


def test_row_remapping_is_read() -> None:
    assert parse_remapped(REMAPPED) == {
        "0000:0f:00": "rows are pending to be remapped: reset the GPU",
        "0000:47:00": "a row could not be remapped: replace the GPU",
    }


def test_xids_are_read_from_the_kernel_log() -> None:
    assert parse_xids(DMESG) == (
        Xid(bus_id="0000:3b:00", number=79, at_s=88123.456789),
        Xid(bus_id="0000:0f:00", number=31, at_s=88200.000001),
        Xid(bus_id="0000:0f:00", number=95, at_s=88300.5),
    )


def test_fresh_faults_of_the_hardware_warn_and_those_of_programs_do_not() -> None:
    found = list(judge_xids(parse_xids(DMESG), 88_400.0))
    assert [finding.found for finding in found] == [
        "GPU 0000:3b:00: Xid 79, the GPU has fallen off the bus, 277 s ago",
        "GPU 0000:0f:00: Xid 95, uncontained memory error, 100 s ago",
    ]
    assert {finding.verdict for finding in found} == {"warns"}
    assert list(judge_xids(parse_xids(DMESG), 200_000.0)) == []


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 0),
        ({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": "4"}, 4),
    ],
)
def test_granted_devices_are_read_from_the_environment(
    environ: dict[str, str], count: int | None
) -> None:
    assert granted(environ) == count


def test_a_healthy_host_with_all_its_gpus_is_fit(tmp_path: Path) -> None:
    (found,) = Host(a_root(tmp_path, 8), healthy()).look(8, {"SLURM_GPUS_ON_NODE": "8"})
    assert (found.verdict, found.found) == ("ok", "8 granted, 8 seen by nvidia-smi, 8 needed")


def why_not(found: Iterable[Finding]) -> str:
    """Why a host is unfit, without the fix."""
    return (why_unfit(found) or "").partition(" (")[0]


def test_a_gpu_that_is_missing_stops(tmp_path: Path) -> None:
    found = Host(a_root(tmp_path, 8), healthy(7)).look(8, {"SLURM_GPUS_ON_NODE": "8"})
    assert why_not(found) == "gpus: 8 granted, 7 seen by nvidia-smi, 8 needed"


def test_too_few_granted_fake_gpus_make_a_host_unfit(tmp_path: Path) -> None:
    host = Host(a_root(tmp_path, 0, driver=False), {})
    assert why_unfit(host.look(2, {"SLURM_GPUS_ON_NODE": "2"})) is None
    environ = {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert why_not(host.look(2, environ)) == "gpus: 1 granted, 2 needed"
    assert why_not(host.look(2, {"SLURM_GPUS_PER_NODE": "2"})) == "gpus: 0 granted, 2 needed"


def test_without_gpus_ranks_run_on_cpus(tmp_path: Path) -> None:
    host = Host(a_root(tmp_path, 0, driver=False), {})
    assert [found.found for found in host.look(2)] == ["none: ranks run on CPUs"]
    hidden = host.look(2, {"CUDA_VISIBLE_DEVICES": ""})
    assert [found.found for found in hidden] == ["hidden: ranks run on CPUs"]


def test_devices_are_counted_without_nvidia_smi(tmp_path: Path) -> None:
    host = Host(a_root(tmp_path, 3), {})
    assert why_unfit(host.look(3)) is None
    assert why_not(host.look(4)) == "gpus: 3 seen by /dev, 4 needed"


def test_a_driver_that_fails_or_hangs_stops(tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n"
    root = a_root(tmp_path, 8)
    failed = Host(root, {"--query-gpu": Completed(15, lost, "")}).look(8)
    assert why_not(failed) == f"gpus: nvidia-smi failed: {lost.strip()}"
    hung = Host(root, {"--query-gpu": None}).look(8)
    assert why_not(hung) == "gpus: nvidia-smi timed out after 20 s"


def test_broken_memory_stops(tmp_path: Path) -> None:
    answers = healthy(4) | {
        "--query-gpu": Completed(0, GPUS, ""),
        "--query-remapped-rows": Completed(0, REMAPPED, ""),
    }
    found = Host(a_root(tmp_path, 4), answers).look(4)
    assert [finding.found for finding in found if finding.verdict == "stops"] == [
        "GPU 0000:0f:00: rows are pending to be remapped: reset the GPU",
        "GPU 0000:47:00: a row could not be remapped: replace the GPU",
    ]
    answers["--query-remapped-rows"] = Completed(2, "", "not supported")
    found = Host(tmp_path, answers).look(4)
    assert [finding.found for finding in found if finding.verdict == "stops"] == [
        "GPU 0000:0f:00: 3 uncorrected ECC errors: reset the GPU",
        "GPU 0000:47:00: memory pages are pending retirement: reset the GPU",
    ]


def test_an_unreadable_kernel_log_is_only_a_note(tmp_path: Path) -> None:
    answers = healthy() | {"dmesg": Completed(1, "", "Operation not permitted")}
    found = Host(a_root(tmp_path, 8), answers).look(8)
    assert (found[-1].what, found[-1].verdict) == ("xid", "note")


def test_the_answers_of_an_h200_are_read() -> None:
    """nvidia-smi of driver 580.159."""
    (gpu,) = parse_gpus("00000000:00:06.0, NVIDIA H200, 0, [N/A]\n")
    assert gpu == Gpu(bus_id="0000:00:06", name="NVIDIA H200", uncorrected=0, pages_pending=False)
    assert parse_remapped("00000000:00:06.0, No, No\n") == {}
