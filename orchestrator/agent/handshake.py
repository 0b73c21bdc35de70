"""How a client proves to the leader that it knows the job's secret: challenge and proof. Pure."""

import json
from collections.abc import Mapping

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.messages.agent_protocol import CHALLENGE, SCHEME, Claim, Proof
from orchestrator.contract.read_json import read_json
from orchestrator.job_secret import JobSecret, is_proved, prove


def challenge(nonce: str) -> dict[str, str]:
    """The headers of a response that asks for a proof."""
    return {CHALLENGE: f"{SCHEME} {nonce}"}


def nonce_in(headers: Mapping[str, str]) -> str | None:
    scheme, _, nonce = headers.get(CHALLENGE, "").partition(" ")
    return nonce if scheme == SCHEME and nonce else None


def proof_headers(secret: JobSecret, nonce: str, claim: Claim) -> dict[str, str]:
    proof = Proof(claim=claim, mac=prove(secret, nonce, claim))
    return {"Authorization": f"{SCHEME} {json.dumps(encode(proof))}"}


def proved(secret: JobSecret, nonce: str, header: str) -> Claim | None:
    """The claim in `header`, if its proof for this `nonce` is valid; else None."""
    scheme, _, body = header.partition(" ")
    if scheme != SCHEME:
        return None
    try:
        proof: Proof = decode(Proof, read_json(body))
    except (ValueError, TypeError):
        return None
    return proof.claim if is_proved(secret, nonce, proof.claim, proof.mac) else None
