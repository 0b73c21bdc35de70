"""Sends a request of a person to the leader of a job, with a proof that it knows the secret."""

import json
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPException, HTTPSConnection
from ssl import SSLSocket
from typing import Any

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.agent.handshake import nonce_in, proof_headers
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.agent_protocol import CHALLENGE, Claim, Purpose
from orchestrator.contract.read_json import read_json
from orchestrator.job_secret import JobSecret, client_context, is_pinned, secret_from

JSON = {"Content-Type": "application/json"}


class Request(Struct, frozen=True, kw_only=True):
    path: str
    purpose: Purpose
    body: Mapping[str, Any]
    timeout_s: float


class Answer(Struct, frozen=True):
    status: int
    text: str


def ask_leader(
    run_dir: RunDir, launch: int, environ: Mapping[str, str], request: Request
) -> Answer | None:
    """The leader's answer; None if it could not be reached from here."""
    try:
        leader = read_json(read_regular(run_dir.leader))
        if leader["launch"] != launch:
            return None  # file of an earlier launch; another program may use that port now
        secret = secret_from(environ.get(env.TOKEN) or read_regular(run_dir.token).decode())
        claim = Claim(purpose=request.purpose, launch=launch)
        return _post(leader["address"], leader["port"], secret, claim, request)
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return None


def _post(address: str, port: int, secret: JobSecret, claim: Claim, request: Request) -> Answer:
    """Send the request to the job's leader.

    Another program may use the leader's port now. So the certificate is checked first, and the
    first request carries no secret: its answer is a nonce, with which the second request proves
    that this side knows the secret.
    """
    connection = HTTPSConnection(address, port, timeout=request.timeout_s, context=client_context())
    with closing(connection):
        connection.connect()
        assert isinstance(connection.sock, SSLSocket)
        if not is_pinned(secret, connection.sock.getpeercert(binary_form=True)):
            raise ConnectionRefusedError("this is not the job's leader")
        connection.request("POST", request.path)
        asked = connection.getresponse()
        asked.read()
        nonce = nonce_in({CHALLENGE: asked.getheader(CHALLENGE, "")}) or ""
        headers = {**proof_headers(secret, nonce, claim), **JSON}
        connection.request("POST", request.path, json.dumps(request.body), headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode(errors="replace"))
