"""The secret of a job: its text, its certificate, and proofs with its key."""

import ssl
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.messages.agent_protocol import Claim
from orchestrator.job_secret import (
    NoSecret,
    draw,
    is_pinned,
    is_proved,
    prove,
    secret_from,
    server_context,
)

TEXT = draw()
SECRET = secret_from(TEXT)
CLAIM = Claim(purpose="agent", launch=3, host="host-0", incarnation="ab")


def test_each_job_has_a_key_and_a_certificate_of_its_own() -> None:
    other = secret_from(draw())
    assert other.key != SECRET.key
    assert other.fingerprint != SECRET.fingerprint
    assert len(SECRET.fingerprint) == 32
    assert secret_from(f"\n{TEXT}\n\n") == SECRET


def test_a_leader_is_identified_only_by_its_certificate() -> None:
    certificate = ssl.PEM_cert_to_DER_cert(TEXT[TEXT.index("-----BEGIN CERT") :])
    assert is_pinned(SECRET, certificate)
    assert not is_pinned(SECRET, certificate[:-1])
    assert not is_pinned(SECRET, None)


def test_the_private_key_is_in_no_file_once_the_leader_has_it(tmp_path: Path) -> None:
    context = server_context(SECRET, tmp_path)
    assert context.cert_store_stats()["x509"] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_secret_is_not_part_of_a_printed_value() -> None:
    shown = repr(SECRET)
    assert SECRET.key.decode() not in shown
    assert "PRIVATE KEY" not in shown


@pytest.mark.parametrize("text", ["", "a-token", "ndctl-job-key \nx", "ndctl-job-key abc\nnothing"])
def test_text_that_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(NoSecret):
        secret_from(text)


def test_a_proof_is_valid_for_one_nonce_and_one_claim_of_one_job() -> None:
    proof = prove(SECRET, "nonce", CLAIM)
    assert is_proved(SECRET, "nonce", CLAIM, proof)
    assert not is_proved(SECRET, "another", CLAIM, proof)
    assert not is_proved(secret_from(draw()), "nonce", CLAIM, proof)
    for other in (
        replace(CLAIM, purpose="cancel"),
        replace(CLAIM, launch=4),
        replace(CLAIM, host="host-1"),
        replace(CLAIM, incarnation="cd"),
    ):
        assert not is_proved(SECRET, "nonce", other, proof)
    for wrong in ("", proof[:-1], proof.upper(), f"{proof} ", "\udce9"):
        assert not is_proved(SECRET, "nonce", CLAIM, wrong)


def test_two_claims_never_have_the_same_bytes() -> None:
    one = replace(CLAIM, host="a", incarnation='b", "c')
    two = replace(CLAIM, host='a", "b', incarnation="c")
    assert prove(SECRET, "n", one) != prove(SECRET, "n", two)
