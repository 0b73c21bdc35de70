"""Runs a container as a local process with its own namespaces for mounts, pids and the host name.

It uses the machine's network. Its root is the machine's root below a temporary overlay; volumes are
bind mounts. The container ends with the process that started it, and so do all its children.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

SETUP = """\
set -e
mount -t tmpfs testbed /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay root -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
R=/mnt/root
while read -r _ at type _; do
  case $at in
    /proc/*|/sys/*|/dev/*|/mnt|/mnt/*|/run/netns*) ;;
    /proc) mount -t proc proc "$R/proc" ;;
    /sys|/dev) mount --rbind "$at" "$R$at" ;;
    /?*) [ "$type" = overlay ] || mount --bind "$at" "$R$at" 2>/dev/null || true ;;
  esac
done < /proc/self/mounts
hostname "$HOST"
"""
TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
WAITER = 'setpriv --pdeathsig KILL sh -c "$0" sh "$@"; exit $?'
"""Starts the first process of the new pid namespace. `unshare --fork` would do the same, but it
returns exit code 1 for a child that SIGKILL ended."""
SET_UP_POLL_S = 0.01
NAMESPACES = ("--mount", "--pid", "--uts")
VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_.][-A-Za-z0-9_.]*)\)")


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool = False


@dataclass
class Container:
    hostname: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    working_dir: str
    mounts: Sequence[Mount]
    log: Path
    process: asyncio.subprocess.Process | None = field(default=None, init=False)
    _copying: "asyncio.Task[None]" = field(init=False)

    async def start(self) -> None:
        """Raises FileNotFoundError if the command does not exist."""
        if shutil.which(self.argv[0], path=self.environ["PATH"]) is None:
            raise FileNotFoundError(self.argv[0])
        launch = ("setpriv", "--pdeathsig", "KILL", "unshare", *_user(), *NAMESPACES)
        script = _script(self.hostname, self.mounts, self.working_dir)
        self.process = await asyncio.create_subprocess_exec(
            *launch,
            *("sh", "-c", WAITER, script, *self.argv),
            env=dict(self.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._copying = asyncio.create_task(self._copy(self.process))
        while self.process.returncode is None and not self._is_set_up(script.encode()):
            await asyncio.sleep(SET_UP_POLL_S)

    def _is_set_up(self, script: bytes) -> bool:
        """Whether the setup script has replaced itself with the command. Before that, the container
        can neither be entered nor stopped as a whole."""
        for pid in self.pids()[:1]:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                return bool(words) and script not in words
        return False

    async def _copy(self, process: asyncio.subprocess.Process) -> None:
        """Copies its output to the log, each line with a timestamp."""
        assert process.stdout is not None
        rest = b""
        with self.log.open("ab", buffering=0) as log:
            while chunk := await process.stdout.read(2**16):
                *lines, rest = (rest + chunk).split(b"\n")
                at = datetime.now(UTC).strftime(TIME).encode()
                log.write(b"".join(at + b" " + line + b"\n" for line in lines))
            if rest:
                log.write(datetime.now(UTC).strftime(TIME).encode() + b" " + rest + b"\n")

    async def wait(self) -> int:
        """Exit code; 128 + n if signal n ended it."""
        assert self.process is not None
        code = await self.process.wait()
        await self._copying
        return code if code >= 0 else 128 - code

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM to its first process, and SIGKILL when the grace period is over. The kernel
        ends all processes of a pid namespace together with the first one."""
        self.signal(15)
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.signal(9)
            await self.wait()

    def signal(self, number: int) -> None:
        for pid in self.pids()[:1]:
            _kill(pid, number)

    def pids(self) -> list[int]:
        """Process ids on this machine; the container's first process comes first."""
        if self.process is None or self.process.returncode is not None:
            return []
        found, todo = [], [self.process.pid]
        while todo:
            children = _children(todo.pop(0))
            found += children
            todo += children
        return found

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command that runs `argv` inside the container, like `kubectl exec`."""
        first = self.pids()[0]
        enter = ("nsenter", *(("--user",) if _user() else ()), *NAMESPACES, "--root", "--wd")
        chdir = ("sh", "-c", f'cd {shlex.quote(self.working_dir)} && exec "$@"', "sh")
        return ["setpriv", "--pdeathsig", "KILL", *enter, "--target", str(first), *chdir, *argv]


def why_no_containers() -> str | None:
    """Why this user cannot create the namespaces; None if it can."""
    probe = ("unshare", *_user(), *NAMESPACES, "--fork", "--mount-proc", "true")
    if missing := [it for it in ("unshare", "nsenter", "setpriv") if shutil.which(it) is None]:
        return f"no {', '.join(missing)} (package util-linux)"
    if subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode != 0:
        return f"no namespaces for this user: `{' '.join(probe)}` fails"
    return None


def expand_variables(text: str, environ: Mapping[str, str]) -> str:
    """Replaces $(NAME) as Kubernetes does: $$ becomes $, and an unknown name is left unchanged."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return VARIABLE.sub(value, text)


def _script(hostname: str, mounts: Sequence[Mount], working_dir: str) -> str:
    lines = [f"HOST={shlex.quote(hostname)}", SETUP]
    for mount in sorted(mounts, key=lambda each: each.target):
        source, target = shlex.quote(str(mount.source)), shlex.quote(mount.target)
        make = "mkdir -p" if mount.source.is_dir() else "install -D /dev/null"
        # realpath runs inside the new root: an absolute link like /var/run would point outside.
        lines.append(f"T=$(chroot $R realpath -m {target})")
        lines.append(f'[ -e "$R$T" ] || chroot $R {make} "$T"')
        lines.append(f'mount --bind {source} "$R$T"')
        if mount.read_only:
            lines.append('mount -o remount,bind,ro "$R$T"')
    chdir = 'mkdir -p "$0" && cd "$0" && exec "$@"'
    lines.append(f'exec chroot "$R" sh -c {shlex.quote(chdir)} {shlex.quote(working_dir)} "$@"')
    return "\n".join(lines)


def _user() -> tuple[str, ...]:
    return () if os.getuid() == 0 else ("--user", "--map-root-user")


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(it) for each in threads for it in (each / "children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
