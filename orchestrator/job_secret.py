"""The secret of a job, with which agents, leader and `ndctl cancel` authenticate each other.

It is one text: a line with a random key, then the private key and the certificate of the job's
leader as PEM. The certificate belongs to the job and not to a host, so a leader on any host can use
it. Clients accept no other certificate (its SHA-256 is pinned). They prove that they know the key
without sending it: the leader sends a random number on each connection, and the client answers with
an HMAC over that number and its claim, with a key for its host that is derived from the job's key.
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
"""Validity of the certificate. Clients pin it and do not check dates."""
MARK = "ndctl-job-key "


@dataclass(frozen=True, slots=True)
class JobSecret:
    key: bytes = field(repr=False)
    pem: str = field(repr=False)
    fingerprint: bytes
    """SHA-256 of the certificate."""


class NoSecret(ValueError):
    """The text is not the secret of a job."""


def draw() -> str:
    """The text of a new secret."""
    # Imported late, because only `submit` needs these modules, not agents and views.
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ndctl job")])
    # The certificate must not reveal anything about this machine or the time.
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
    """TLS context of the leader. OpenSSL reads the key only from a file, so one exists in `folder`
    for a moment."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Clients never resume a session, so tickets would be useless work.
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
    """TLS context of a client. The client compares the fingerprint, so names and dates are not
    checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def is_pinned(secret: JobSecret, certificate: bytes | None) -> bool:
    """Whether a server with this certificate (DER) is the job's leader."""
    return hmac.compare_digest(hashlib.sha256(certificate or b"").digest(), secret.fingerprint)


def prove(secret: JobSecret, nonce: str, claim: Claim) -> str:
    """The proof of `claim`, which only a holder of the secret can compute, valid for this
    `nonce`."""
    host_key = hmac.digest(secret.key, f"ndctl host {claim.host}".encode(), "sha256")
    # JSON, so that two different claims never have the same bytes.
    said = json.dumps([nonce, claim.purpose, claim.host, claim.launch, claim.incarnation])
    return hmac.digest(host_key, said.encode(), "sha256").hex()


def is_proved(secret: JobSecret, nonce: str, claim: Claim, proof: str) -> bool:
    sent = proof.encode(errors="surrogateescape")
    return hmac.compare_digest(prove(secret, nonce, claim).encode(), sent)
