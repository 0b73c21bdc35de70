"""A training script as a job."""

import json
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, CommandResult, Ndctl

SCRIPTS = ROOT / "examples" / "scripts"


@dataclass(frozen=True)
class Script:
    path: Path
    preload: tuple[str, ...] = ()
    """Modules that a host imports once and not once for each rank, to save time."""
    needs: str = "torch"
    """Package without which the script does not run."""

    def submit(self, ndctl: Ndctl, *words: str, steps: int, hosts: int = 2) -> CommandResult:
        """Run it as job `e2e` with 2 ranks a host. It saves at each fifth step, and a step takes
        about 0.1 s."""
        if find_spec(self.needs) is None:
            pytest.skip(f"{self.needs} is not installed")
        folder = ndctl.run_root
        folder.mkdir(exist_ok=True)
        args = ["--steps", steps, "--save-every", 5, "--pause", 0.1]
        spec = {
            "name": "e2e",
            "run": {
                "script": str(self.path),
                "args": [str(arg) for arg in args],
                "workdir": str(folder),
                "preload": ["torch._dynamo", *self.preload],
            },
            "cluster": {"backend": "local", "hosts": hosts, "gpus_per_host": 2},
            "resilience": {"stop_grace": 60},
        }
        path = folder / "spec.yaml"
        path.write_text(json.dumps(spec))  # JSON is YAML
        return ndctl("submit", str(path), *words)


def example(name: str, preload: tuple[str, ...] = (), needs: str = "torch") -> Script:
    """The script `name` of examples/scripts."""
    return Script(SCRIPTS / name, preload, needs)


def steps_trained_twice(ndctl: Ndctl) -> set[int]:
    counts = Counter(metric["step"] for metric in ndctl.metrics())
    return {step for step, count in counts.items() if count > 1}


def uninterrupted_losses(script: Script, folder: Path, steps: int) -> dict[int, float]:
    """Step to loss of a job without a fault."""
    ndctl = Ndctl(folder)
    done = script.submit(ndctl, "--follow", steps=steps)
    assert done.code == 0, done.out + done.err
    losses = ndctl.losses()
    assert sorted(losses) == list(range(1, steps + 1))
    return losses
