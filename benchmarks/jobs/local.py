"""The same training under ndctl and under bare torchrun, for the benchmarks that compare them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPEC = Path("examples/quickstart.yaml")
BIN = Path(sys.executable).parent


def sets(**options: object) -> list[str]:
    return [f"--set={key.replace('__', '.')}={value}" for key, value in options.items()]


@contextmanager
def under_ndctl(root: Path, options: Sequence[str]) -> Iterator[Path]:
    """Two hosts of two ranks with their agents; the run directory."""
    command = [str(BIN / "ndctl"), "submit", str(SPEC), "--run-root", str(root), *options]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    try:
        yield root / "quickstart"
    finally:
        cancel = [str(BIN / "ndctl"), "cancel", "quickstart", "--run-root", str(root)]
        subprocess.run(cancel, check=False, timeout=120, capture_output=True)


@contextmanager
def under_torchrun(
    root: Path, options: Sequence[str], restarts: int, more: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """The same trainer and configuration as four ranks of one bare torchrun; its `out`."""
    out = root / "bare"
    out.mkdir(parents=True)
    shown = subprocess.run(
        [str(BIN / "ndctl"), "submit", str(SPEC), "--run-root", str(root), "--dry-run", *options],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout
    config, _ = json.JSONDecoder().raw_decode(shown, shown.index("{"))
    config["out"] = str(out)
    (out / "config.json").write_text(json.dumps(config))
    command = [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node=4",
        f"--max-restarts={restarts}",
        "-m",
        "trainer",
        str(out / "config.json"),
    ]
    # Without this, ranks that torchrun restarts on gloo read addresses of the dead ones.
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environ |= more or {}
    with (out / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            yield out
        finally:
            process.terminate()
            process.wait(timeout=90)


OWN_SCRIPT = Path(__file__).with_name("own_script.py")


@contextmanager
def script_under_ndctl(
    root: Path, hosts: int, ranks: int, words: Sequence[str] = ()
) -> Iterator[Path]:
    """`own_script.py` as a user runs it with ndctl; the folder of its steps."""
    out = root / "out"
    command = [str(BIN / "ndctl"), "run", "--name", "own", "--run-root", str(root)]
    command += [f"--hosts={hosts}", f"--gpus-per-host={ranks}", "--"]
    command += [str(OWN_SCRIPT), "--out", str(out), *words]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    try:
        yield out
    finally:
        cancel = [str(BIN / "ndctl"), "cancel", "own", "--run-root", str(root)]
        subprocess.run(cancel, check=False, timeout=120, capture_output=True)


@contextmanager
def script_under_torchrun(
    root: Path, ranks: int, restarts: int, words: Sequence[str] = ()
) -> Iterator[Path]:
    """The same script as the ranks of one bare torchrun; the folder of its steps."""
    out = root / "out"
    command = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(OWN_SCRIPT), "--out", str(out), *words]
    # As for the trainer above.
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environ["NDCTL_RUN_DIR"] = str(root / "run")
    with (root / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            yield out
        finally:
            process.terminate()
            process.wait(timeout=90)


def steps_of(out: Path) -> list[dict[str, Any]]:
    """The lines of `own_script.py` so far."""
    return lines_of(out / "steps.jsonl")


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl so far."""
    return lines_of(folder / "metrics.jsonl")


def lines_of(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def redone(lines: Sequence[Mapping[str, Any]]) -> tuple[int, bool]:
    """Of the lines of metrics.jsonl: steps that were done twice, and whether their losses are the
    same bits."""
    losses: dict[int, set[float]] = {}
    for line in lines:
        losses.setdefault(line["step"], set()).add(line["loss"])
    return len(lines) - len(losses), all(len(values) == 1 for values in losses.values())


def rank_pid(folder: Path, rank: int) -> int:
    """The process of one rank of the run in `folder`."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = (place / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # A rank of ndctl's is forked and has its title; one of torchrun alone has its environment.
        ours = f" trainer {folder}/" in command and command.rstrip().endswith(f"(rank {rank})")
        if ours or (f" -m trainer {folder}/" in command and f"RANK={rank}".encode() in environ):
            return int(place.name)
    raise RuntimeError(f"no process of rank {rank} in {folder}")
