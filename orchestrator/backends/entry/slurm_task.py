"""The task on each node of a Slurm allocation: run the hooks and the agent."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from orchestrator.backends.slurm.on_nodes import address
from orchestrator.backends.slurm.on_nodes.hooks import run_hook
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.nodes import parse_nodes
from orchestrator.system import run_command

log = logging.getLogger(__name__)

ASK_S = 10.0


def main(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Run the before hook, the agent, and the after hook."""
    args = _parser().parse_args(argv)
    _ignore_notices()
    host = environ.get("SLURMD_NODENAME") or socket.gethostname()
    log_to(RunDir(Path(args.run_dir)).agent_log(host))
    reached = _address(host, environ)
    environ = {**environ, "NDCTL_RUN_DIR": args.run_dir, env.HOST: host}
    hook_log, failed = RunDir(Path(args.run_dir)).hook_log(host), ""
    if args.before:
        # Before the agent is imported, because the hook may create files that the import needs.
        failed = run_hook("before", args.before, environ, hook_log, args.before_limit)
    if _never_starts(RunDir(Path(args.run_dir)), first=environ.get("SLURM_NODEID") == "0"):
        sys.exit(exit_codes.FAILED)
    from orchestrator.backends.entry.agent import main as agent

    words = [
        f"--run-dir={args.run_dir}",
        f"--host={host}",
        f"--address={reached}",
        f"--launch={args.launch}",
        f"--devices={args.devices}",
        f"--agent-timeout={args.agent_timeout}",
        f"--restarts={environ.get('SLURM_RESTART_COUNT', '0')}",
        *(["--lead"] if args.first_leads and environ.get("SLURM_NODEID") == "0" else []),
        f"--leader-late={args.before_limit if args.before else 0}",
        f"--hook-failed={failed}",
    ]
    code = agent(words, _for_gloo(environ, reached))
    if args.after:
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # the hook may run until Slurm kills this step
        if why := run_hook("after", args.after, environ, hook_log, args.after_limit):
            log.warning("after hook failed on %s: %s", host, why)
    sys.exit(code)


def _never_starts(run_dir: RunDir, *, first: bool) -> bool:
    """Whether a job of `--after` ended otherwise than it should. Slurm itself does not know: a job
    that `ndctl cancel` ended with a checkpoint is COMPLETED for it. The first node ends this job.
    """
    from orchestrator.journal.current_launch import current_launch

    launched = current_launch(run_dir)
    if launched is None or not launched.launch.after:
        return False
    from orchestrator.app.cancel_job import record_cancel
    from orchestrator.backends.entry.local_queue import failed_of
    from orchestrator.system import SystemClock

    if not (why := failed_of(launched.launch.after)):
        return False
    log.error("the job is cancelled: %s", why)
    if first:
        record_cancel(run_dir, f"ndctl, because {why}", SystemClock())
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orchestrator.backends.entry.slurm_task")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--launch", type=int, required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--agent-timeout", type=float, required=True)
    parser.add_argument(
        "--first-leads",
        action="store_true",
        help="the agent of the first node of the step leads; a restarted agent never leads",
    )
    parser.add_argument("--before", default="", help="shell command to run before the agent")
    parser.add_argument("--before-limit", type=float, default=0.0, help="its timeout in seconds")
    parser.add_argument("--after", default="", help="shell command to run after the agent")
    parser.add_argument("--after-limit", type=float, default=0.0, help="its timeout in seconds")
    return parser


def _ignore_notices() -> None:
    """Ignore Slurm's early notices until the agent handles them. Their default action would kill
    this process. SIGTERM announces the end itself."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def log_to(path: Path) -> None:
    try:
        # Not `parents`: a run directory that was moved away must not come into being again.
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as exc:  # a full disk, a moved run directory: log to the step
        sys.stderr.write(f"failed to open {path}, logging here: {exc}\n")
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _address(host: str, environ: Mapping[str, str]) -> str:
    """The address of this host for other hosts. Raises OSError if there is none."""
    resolved = address.resolve(host)
    if resolved and not address.is_loopback(resolved):
        return resolved
    hosts = expand(environ.get("SLURM_JOB_NODELIST", ""))
    others = [name for name in hosts if name != host]
    routed = address.routed_towards(others)
    found = address.choose_address(resolved, _node_addr(host), routed, address.resolve)
    if found is None:
        raise OSError(f"cannot resolve the name of this host, {host}, or its NodeAddr")
    return found


def _node_addr(host: str) -> str:
    with contextlib.suppress(TimeoutError):
        said = run_command(["scontrol", "show", "node", "-a", "-o", host], timeout=ASK_S)
        return next((node.address for node in parse_nodes(said.out)), "")
    return ""


def _for_gloo(environ: Mapping[str, str], reached: str) -> Mapping[str, str]:
    """gloo uses the address of the machine's own name. If it differs, set its interface."""
    own = address.resolve(socket.gethostname())
    known = any(name in environ for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"))
    if known or own == reached:
        return environ
    interface = address.interface_of(reached)
    return {**environ, "GLOO_SOCKET_IFNAME": interface} if interface else environ


if __name__ == "__main__":
    main(sys.argv[1:], dict(os.environ))
