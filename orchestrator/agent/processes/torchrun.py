"""The command line of torchrun on one host. Pure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.contract.codec import encode
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.skipped_batches import to_text
from orchestrator.contract.spec.run_spec import Keep, RunSpec
from orchestrator.run_module import command

KEEPER = Path(__file__).with_name("rank_watcher.py")


class HostPlace(Struct, frozen=True, kw_only=True):
    """The host of an agent, and the paths that it uses there."""

    python: str
    run_dir: RunDir
    host: str
    address: str
    socket: Path
    """Where ranks send their datagrams."""
    parent: int
    """The agent's process id."""
    imports: tuple[str, ...] = ("torch.distributed.launcher.api", "trainer.imports")
    """Modules that take seconds to import: first for torchrun and all-reduce checks, then for
    ranks."""
    learned: Path | None = None
    """File with more modules, which the ranks of a user's script imported; None: not used."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """`run.env`. Libraries read it when they are imported, so the fork server needs it too."""

    def with_program(self, run: RunSpec) -> Self:
        """The same host, for ranks of the user's own program."""
        own = () if run.preload == "auto" else run.preload
        learns = run.preload == "auto" and run.is_python
        return replace(
            self,
            imports=(self.imports[0], *own),
            learned=self.run_dir.learned_imports if learns else None,
            environ=run.env,
        )

    @property
    def lock(self) -> Path:
        return self.run_dir.ranks_lock(self.host)


def render(start: Start, place: HostPlace, port: int | None = None) -> list[str]:
    """torchrun with static rendezvous and no restarts: the leader starts all attempts.

    Args:
        port: given if the ranks may outlive the attempt. Then this torchrun is alone, with a store
            of its own at this port, because those of other hosts may not outlive it.
    """
    log_dir = place.run_dir.attempt_logs(start.attempt, place.host)
    endpoint = f"{start.master_address}:{start.master_port}"
    torchrun = [
        *command(place.python, "trainer.rank.torchrun"),
        f"--nnodes={1 if port else start.nodes}",
        f"--nproc-per-node={start.ranks_per_host}",
        # Our own backend: the store of torchrun's static backend listens on all addresses.
        "--rdzv-backend=ndctl",
        f"--rdzv-endpoint={f'{place.address}:{port}' if port else endpoint}",
        f"--rdzv-conf=rank={0 if port else start.node_rank}",
        f"--local-addr={place.address}",
        # By default torchrun's own files stay in /tmp for ever. Here they go with the agent.
        f"--log-dir={place.socket.parent}",
        "--max-restarts=0",
        # Without SIGTERM: torchrun would end its ranks while they write their checkpoint.
        "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT",
        # Fork from this process, because it has already imported what every rank needs.
        "--start-method=fork",
        "--run-path",
    ]
    keeper = [str(KEEPER), "--lock", str(place.lock), "--log-dir", str(log_dir), "--"]
    if start.run is None:
        return [*torchrun, *keeper, *command(place.python, "trainer"), start.config]
    program = [*command(place.python, "trainer.program"), start.run.workdir]
    copy = start.capture
    captured = [] if copy is None else ["--capture", copy.folder, copy.copy]
    return [*torchrun, *keeper, *program, *captured, *start.run.words]


def with_defaults(environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` with defaults for the fork server and all that it starts."""
    return {
        # torchrun sets this for ranks too, but after the libraries that read it are loaded.
        "OMP_NUM_THREADS": "1",
        # Count GPUs by NVML: once the CUDA driver is initialised, a fork cannot use it.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # `python -m` must not import from the working directory, also when a library starts it.
        env.SAFE_PATH: "1",
        # A rank whose collective failed ends at once. torchrun's default (1) aborts communicators
        # first, which can hang when peers are gone; then only the hang limit would end the rank.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        **environ,
    }


def environment(start: Start, place: HostPlace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The agent's own environment, with the variables that the ranks need besides torchrun's."""
    if start.run is not None:
        # The script's folder is part of its search path, also in processes that it starts.
        safe = env.SAFE_PATH
        environ = {name: value for name, value in environ.items() if name != safe}
        environ |= {**start.run.env, env.KEEP: json.dumps(encode(start.keep or Keep()))}
    return {
        **environ,
        env.RUN_DIR: str(place.run_dir.path),
        env.ATTEMPT: str(start.attempt),
        env.HOST: place.host,
        env.HEARTBEAT_SOCKET: str(place.socket),
        env.TRACE_DIR: str(place.run_dir.traces(start.attempt)),
        env.DRILLS: json.dumps(encode(start.drills)),
        env.SKIP: to_text(start.skip),
        env.RESUME: "newest" if start.resume else "none",
        env.PACE: json.dumps(encode(start.pace)),
        **_place_of(start),
    }


def _place_of(start: Start) -> Mapping[str, str]:
    """The variable by which ranks that may outlive the attempt know their place in it."""
    if not start.keep_ranks:
        return {}
    place = env.Place(
        node_rank=start.node_rank,
        nodes=start.nodes,
        address=start.master_address,
        port=start.master_port,
    )
    return {env.PLACE: json.dumps(encode(place))}
