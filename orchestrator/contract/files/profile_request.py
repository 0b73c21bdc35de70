"""The file by which an agent asks a rank for a profile of its next steps.

It is beside the agent's socket, in a folder of this host that no other user can enter. So a rank
can look for it at each step, which costs a microsecond, and a rank that hangs or computes is not
disturbed, as it would be by a signal.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.limits import AtLeast


class ProfileRequest(Struct, frozen=True, kw_only=True):
    id: str
    steps: Annotated[int, AtLeast(1)]


def request_path(env: RankEnv) -> Path:
    return path_of(Path(env.heartbeat_socket), env.attempt, env.rank)


def path_of(socket: Path, attempt: int, rank: int) -> Path:
    return socket.parent / f"attempt-{attempt}-rank-{rank}.profile"


def write_request(path: Path, request: ProfileRequest) -> None:
    """Raises OSError."""
    write_whole(path, json.dumps(encode(request)).encode())


def take_request(path: Path) -> ProfileRequest | None:
    """The request, which is removed; None if there is none that can be read."""
    try:
        request: ProfileRequest = decode(ProfileRequest, read_json(read_regular(path)))
    except (OSError, ValueError, Invalid):
        return None
    finally:
        with suppress(OSError):
            path.unlink()
    return request
