"""The command line of torchrun on one host. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.codec import encode
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.skipped_batches import to_text
from orchestrator.run_module import command

KEEPER = Path(__file__).with_name("rank_watcher.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """Where an agent works."""

    python: str
    run_dir: RunDir
    host: str
    address: str
    socket: Path
    """Where ranks send their datagrams."""
    parent: int
    """The agent's process id."""
    imports: tuple[str, ...] = ("torch.distributed.launcher.api", "trainer.imports")
    """What takes seconds to import: for torchrun and checks of the fabric, and then for ranks."""

    @property
    def lock(self) -> Path:
        return self.run_dir.ranks_lock(self.host)


def render(start: Start, place: HostPlace) -> list[str]:
    """torchrun with static rendezvous; attempts are ours, so it restarts nothing itself."""
    log_dir = place.run_dir.attempt_logs(start.attempt, place.host)
    torchrun = [
        *command(place.python, "trainer.rank.torchrun"),
        f"--nnodes={start.nodes}",
        f"--nproc-per-node={start.ranks_per_host}",
        # Of ours, as the store of torchrun's own static one listens at every address of the host.
        "--rdzv-backend=ndctl",
        f"--rdzv-endpoint={start.master_address}:{start.master_port}",
        f"--rdzv-conf=rank={start.node_rank}",
        f"--local-addr={place.address}",
        # What it writes itself goes with the agent; its own choice would stay in /tmp for good.
        f"--log-dir={place.socket.parent}",
        "--max-restarts=0",
        # Not SIGTERM, at which it would end its ranks while they write their checkpoint.
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        # In this very process, which has imported already what every rank needs.
        "--start-method=fork",
        "--run-path",
    ]
    keeper = [str(KEEPER), "--lock", str(place.lock), "--log-dir", str(log_dir), "--"]
    return [*torchrun, *keeper, *command(place.python, "trainer"), start.config]


def with_defaults(environ: Mapping[str, str]) -> Mapping[str, str]:
    """What a host's launcher and all below it begin with, where nobody has set it otherwise."""
    return {
        # As torchrun would set it for ranks, but before the libraries that read it are loaded.
        "OMP_NUM_THREADS": "1",
        # Whether there are GPUs is asked without CUDA's driver, which would not survive a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # No program that a library starts by `python -m` looks into the working directory either.
        "PYTHONSAFEPATH": "1",
        # A rank whose collective failed ends at once. Aborting communicators first (1, torchrun's
        # own) can hang on ranks that are gone, and then only the hang limit would end it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        **environ,
    }


def environment(start: Start, place: HostPlace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The agent's own environment, and what the ranks are told besides what torchrun tells them."""
    return {
        **environ,
        env.ATTEMPT: str(start.attempt),
        env.HOST: place.host,
        env.HEARTBEAT_SOCKET: str(place.socket),
        env.TRACE_DIR: str(place.run_dir.traces(start.attempt)),
        env.DRILLS: json.dumps(encode(start.drills)),
        env.SKIP: to_text(start.skip),
        env.RESUME: "newest" if start.resume else "none",
        env.PACE: json.dumps(encode(start.pace)),
    }
