"""The secret of a job: how its agents, its leader and who cancels it know one another.

It is one text: a line with a random key, then the private key and the certificate of the job's
leader as PEM. The certificate is the job's, not a host's, so a leader on any host has it. Clients
take no other certificate (its SHA-256 is pinned). They prove that they know the key without sending
it: the leader gives each connection a random number, and the answer is an HMAC over that and over
who asks for what, with a key for that host which is derived from the job's.
"""

import hashlib
import hmac
import json
import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.contract.messages.agent_protocol import Claim

YEARS = 50
"""For which the certificate is valid; clients pin it and look at no date."""
MARK = "ndctl-job-key "


@dataclass(frozen=True, slots=True)
class JobSecret:
    key: bytes = field(repr=False)
    pem: str = field(repr=False)
    fingerprint: bytes
    """SHA-256 of the certificate."""


class NoSecret(ValueError):
    """The text is no secret of a job."""


def draw() -> str:
    """The text of a new secret."""
    # Late: whoever submits needs it, agents and views do not.
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ndctl job")])
    # Nothing of this machine or of the time is to be read from it.
    begins = datetime(2020, 1, 1, tzinfo=UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + timedelta(days=365 * YEARS))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return f"{MARK}{secrets.token_urlsafe(32)}\n{private.decode()}{public.decode()}"


def secret_from(text: str) -> JobSecret:
    """Raises NoSecret."""
    first, _, pem = text.strip().partition("\n")
    key = first.removeprefix(MARK)
    if not first.startswith(MARK) or not key:
        raise NoSecret("the job's secret does not begin with its key")
    at = pem.find("-----BEGIN CERTIFICATE-----")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(pem[at:] if at >= 0 else "")
    except ValueError as exc:
        raise NoSecret("the job's secret has no certificate") from exc
    return JobSecret(key.encode(), pem, hashlib.sha256(certificate).digest())


def server_context(secret: JobSecret, folder: Path) -> ssl.SSLContext:
    """For the leader. OpenSSL reads the key from a file: one in `folder`, for a moment."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No session is taken up again: to make tickets would be work for nothing.
    context.num_tickets = 0
    path = folder / f"leader-{secrets.token_hex(8)}.pem"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secret.pem)
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context


def client_context() -> ssl.SSLContext:
    """For a client that compares the fingerprint itself, which says more than any name or date."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_pinned(secret: JobSecret, certificate: bytes | None) -> bool:
    """Whether a server that showed this certificate (DER) is the job's leader."""
    return hmac.compare_digest(hashlib.sha256(certificate or b"").digest(), secret.fingerprint)


def prove(secret: JobSecret, nonce: str, claim: Claim) -> str:
    """What only a holder of the secret can say, and what is right for this `nonce` alone."""
    host_key = hmac.digest(secret.key, f"ndctl host {claim.host}".encode(), "sha256")
    # As JSON, for no two claims to be the same bytes.
    said = json.dumps([nonce, claim.purpose, claim.host, claim.launch, claim.incarnation])
    return hmac.digest(host_key, said.encode(), "sha256").hex()


def is_proved(secret: JobSecret, nonce: str, claim: Claim, proof: str) -> bool:
    sent = proof.encode(errors="surrogateescape")
    return hmac.compare_digest(prove(secret, nonce, claim).encode(), sent)
