"""A machine whose constants are known is found again from its samples."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.app.planning.calibrations import Calibrated, base_of, calibrated, write
from orchestrator.calibrate.fit import fit, noise_of, notes_of
from orchestrator.calibrate.lines import fitted
from orchestrator.calibrate.show import describe_measurements
from orchestrator.contract.messages.measurements import Measurements
from orchestrator.errors import SpecError
from orchestrator.inventory.profile import Fabric, Profile
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.accuracy import CALIBRATED, speed_range
from orchestrator.plan.cost.kernels import attention_s, matmul_s, move_s
from orchestrator.plan.cost.machine import Machine, machine_of
from tests.agent.world import TurnedClock
from tests.calibrate.samples import measured
from tests.plan.history.jobs import setup


def a_cpu(**changes: Any) -> Profile:
    """A processor that is unlike the guessed one."""
    cpu = load_profile("cpu")
    calibration = replace(
        cpu.calibration, depth_half=190.0, gap_s=9e-6, gemm={"float32": 0.9, "bfloat16": 0.8}
    )
    link = replace(cpu.intra_host, bytes_per_s=3e9, latency_s=20e-6)
    values = {
        "flops": {"float32": 31e9, "bfloat16": 300e9},
        "memory_bytes_per_s": 4e9,
        "intra_host": link,
        "calibration": calibration,
    }
    return replace(cpu, **values | changes)


def written(found: Measurements, folder: Path) -> Profile:
    path = folder / "here.yaml"
    write(calibrated(found, "a-host", TurnedClock()), path)
    return load_profile(str(path))


def machine(profile: Profile, hosts: int = 1, ranks: int = 4) -> Machine:
    return machine_of(Fabric(profile=profile, hosts=hosts, devices_per_host=ranks))


def test_a_cpu_is_found_again(tmp_path: Path) -> None:
    true = machine(a_cpu())
    found = machine(written(measured(a_cpu()), tmp_path))
    assert found.calibration.certainty == "calibrated"
    for kind in ("float32", "bfloat16"):
        for sizes in ((512, 512, 128), (4096, 1024, 512), (256, 256, 4096)):
            assert matmul_s(found, *sizes, kind) == pytest.approx(
                matmul_s(true, *sizes, kind), rel=0.03
            )
    for tokens in (512, 2048):
        args = (tokens**2 / 2, 8 * 128, 128, tokens, tokens)
        for one, other in zip(attention_s(found, *args), attention_s(true, *args), strict=True):
            assert one == pytest.approx(other, rel=0.03)
    assert move_s(found, 1e8, 7) == pytest.approx(move_s(true, 1e8, 7), rel=0.01)
    for size in (1e4, 1e6, 1e9):
        ours = found.wire(4, 1).gather_s(size)
        assert ours == pytest.approx(true.wire(4, 1).gather_s(size), rel=0.02)


def test_a_known_gpu_keeps_its_nominal_rates_and_its_constants_of_training(
    tmp_path: Path,
) -> None:
    h100 = load_profile("h100-sxm-80gb")
    slow = replace(h100, intra_host=replace(h100.intra_host, bytes_per_s=300e9))
    found = written(measured(slow, hosts=2, ranks=8), tmp_path)
    assert (found.name, found.flops, found.power_w) == (h100.name, h100.flops, h100.power_w)
    assert found.intra_host == h100.intra_host
    ours, base = found.calibration, h100.calibration
    assert (ours.tiles, ours.steady, ours.contention) == (base.tiles, base.steady, base.contention)
    assert (ours.certainty, ours.architecture) == ("calibrated", "hopper")
    assert ours.memory == pytest.approx(base.memory), "the copy reached what is usual"
    assert ours.host_link == pytest.approx(40e9)
    assert ours.host_op_s == pytest.approx(5e-6)
    links = ours.links
    assert links["nvlink4"].share == pytest.approx(0.81 * 300 / 450, rel=0.01)
    assert links["infiniband"].share == pytest.approx(base.links["infiniband"].share, rel=0.05)
    assert 0.5 < ours.gemm["bfloat16"] < base.gemm["bfloat16"], "steady products, not the best"
    assert found.sustained == ours.gemm["bfloat16"]
    assert found.sources["calibration.gemm.bfloat16"].startswith("ndctl calibrate on a-host")
    assert "NVIDIA" in found.sources["flops.bfloat16"]
    published = speed_range(setup(), ours, hosts=1)
    assert "published" in published.basis, "runs on this kind of device are known"


def test_an_unknown_gpu_gets_its_own_name_and_measured_rates(tmp_path: Path) -> None:
    a100 = load_profile("a100-sxm-80gb")
    found = written(measured(a100, ranks=2, device_name="Example GPU X9 (96 GB)"), tmp_path)
    assert found.name == "example-gpu-x9-96-gb"
    assert found.memory_bytes == a100.memory_bytes
    assert found.flops["bfloat16"] < a100.flops["bfloat16"]
    assert found.calibration.gemm["bfloat16"] == pytest.approx(1.0)
    true, ours = machine(a100, ranks=2), machine(found, ranks=2)
    deep = (8192, 8192, 8192, "bfloat16")
    # The rate of training, `steady`, stays that of the device whose constants are used.
    ratio = ours.calibration.steady
    assert matmul_s(ours, *deep) == pytest.approx(matmul_s(true, *deep) / ratio, rel=0.1)
    assert speed_range(setup(), found.calibration, hosts=1)[:2] == CALIBRATED


def test_numbers_that_were_not_measured_stay_and_the_file_says_so(tmp_path: Path) -> None:
    cpu = load_profile("cpu")
    alone = measured(a_cpu(), ranks=1)
    alone = replace(alone, missing=3, samples=alone.samples[:4])
    found = written(alone, tmp_path)
    assert found.intra_host == cpu.intra_host
    assert found.memory_bytes_per_s == cpu.memory_bytes_per_s
    text = (tmp_path / "here.yaml").read_text()
    assert "the time did not suffice for 3 of 7 measurements" in text
    assert "one rank has no link inside a host" in text
    nothing = replace(alone, samples=())
    assert written(nothing, tmp_path).flops == cpu.flops


def test_a_busy_machine_is_named_and_its_numbers_are_written_all_the_same(tmp_path: Path) -> None:
    calm = measured(a_cpu())
    assert not any("busy" in note for note in notes_of(calm))
    busy = replace(
        calm,
        load=17.0,
        samples=tuple(replace(one, high=2 * one.seconds) for one in calm.samples),
    )
    assert noise_of(busy) > 1
    made = calibrated(busy, "a-host", TurnedClock())
    assert "the machine was busy" in made.notes[0]
    assert "load 17.0 on 8 processors" in made.notes[0]
    write(made, tmp_path / "busy.yaml")
    assert (tmp_path / "busy.yaml").read_text().splitlines()[1].startswith("# the machine was busy")
    assert load_profile(str(tmp_path / "busy.yaml")).calibration.certainty == "calibrated"


def test_every_sample_has_a_line(tmp_path: Path) -> None:
    found = measured(load_profile("h100-sxm-80gb"), hosts=2, ranks=8, hot=0.9)
    text = describe_measurements(found)
    assert len(text.splitlines()) == len(found.samples) + 2
    assert "TFLOP/s" in text
    assert "2 ranks, across hosts" in text
    assert "90% of the first" in " ".join(notes_of(found))


def test_a_profile_has_the_name_of_a_yaml_file(tmp_path: Path) -> None:
    made: Calibrated = calibrated(measured(a_cpu()), "a-host", TurnedClock())
    with pytest.raises(SpecError, match=r"\.yaml"):
        write(made, tmp_path / "profile.json")


seconds = st.floats(1e-7, 1e3)


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from(["cpu", "cuda"]))
def test_any_times_give_a_profile_that_can_be_read(times: list[float], device: str) -> None:
    profile = a_cpu() if device == "cpu" else load_profile("h100-sxm-80gb")
    found = measured(profile, hosts=2, ranks=4)
    odd = tuple(
        replace(one, seconds=times[number % len(times)], low=1e-8, high=1e4)
        for number, one in enumerate(found.samples)
    )
    found = replace(found, samples=odd)
    data = fit(found, base_of(found), "a test")
    assert all(0 < rate < float("inf") for rate in data["flops"].values())
    for share in data["calibration"].get("gemm", {}).values():
        assert 0 < share <= 1


@given(st.floats(1e-12, 1e-3), st.floats(1e-9, 1e-2))
def test_a_line_is_found_from_its_points(slope: float, start: float) -> None:
    line = fitted([(x, start + slope * x) for x in (1e3, 1e5, 1e7)])
    assert line is not None
    assert line.start + line.slope * 1e6 == pytest.approx(start + slope * 1e6, rel=1e-3)


def test_points_with_one_size_have_no_line() -> None:
    assert fitted([(4.0, 1.0), (4.0, 2.0)]) is None
    assert fitted([]) is None
