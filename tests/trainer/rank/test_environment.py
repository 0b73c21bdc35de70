"""Environment variables for torch that a rank sets before it imports torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import RankEnv
from tests.trainer.launch.tiny_runs import ROOT, run_program
from trainer.rank.environment import gpu_defaults, torch_defaults
from trainer.rank.ranks import INIT_TIMEOUT


def test_the_nccl_monitor_allows_the_longest_wait() -> None:
    values = torch_defaults(RankEnv())
    assert int(values["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) >= INIT_TIMEOUT.total_seconds()


def test_the_flight_recorder_writes_next_to_the_stacks() -> None:
    assert "TORCH_FR_DUMP_TEMP_FILE" not in torch_defaults(RankEnv())
    values = torch_defaults(RankEnv(trace_dir="/run/traces"))
    assert values["TORCH_FR_DUMP_TEMP_FILE"] == "/run/traces/flight-"


def test_a_gpu_gets_expandable_segments_unless_the_user_chose() -> None:
    assert gpu_defaults({}, gpu=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert gpu_defaults({}, gpu=False) == {}
    # torch prefers the new name, so a value under an old one would be lost.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = gpu_defaults({name: "max_split_size_mb:128"}, gpu=True)
        assert "PYTORCH_ALLOC_CONF" not in chosen


def test_beside_nccl_gloo_connects_on_demand() -> None:
    assert gpu_defaults({}, gpu=True)["TORCH_GLOO_LAZY_INIT"] == "1"


@pytest.mark.gpu
def test_torch_uses_the_setting_that_a_rank_makes_after_torch_was_imported() -> None:
    """A rank is forked from a process that has imported torch."""
    program = (
        "import os, torch\n"
        "from trainer.rank.environment import gpu_defaults\n"
        "os.environ.update(gpu_defaults(os.environ, gpu=True))\n"
        "torch.empty(1, device='cuda')\n"
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])\n"
    )
    assert run_program(program).split() == ["True"]


@pytest.mark.process
def test_defaults_are_set_before_torch_is_imported_and_keep_set_values(tmp_path: Path) -> None:
    """`start` is replaced by a function that prints the environment."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "import trainer.process\n"
        "def start(arguments, env):\n"
        "    names = [name for name in os.environ if name.startswith('TORCH_')]\n"
        "    print('torch' in sys.modules, *[f'{name}={os.environ[name]}' for name in names])\n"
        "    return 0\n"
        "trainer.process.start = start\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "trainer", "config"],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "NDCTL_TRACE_DIR": "/run/traces",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == exit_codes.OK, run.stderr
    words = run.stdout.split()
    assert words[0] == "False", "torch is not imported yet"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT=0" in words
    assert "TORCH_FR_BUFFER_SIZE=2000" in words
    assert "TORCH_FR_DUMP_TEMP_FILE=/run/traces/flight-" in words
