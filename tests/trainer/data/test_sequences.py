"""How a stream of tokens is cut into sequences."""

from pathlib import Path

import pytest

from tests.trainer.data.data_files import packed, sequences, write_rows, write_texts
from trainer.data.packing.documents import Columns
from trainer.data.sequences import Sequences, fingerprint, num_held_out, num_sequences
from trainer.model.chunked_loss import NOT_LEARNED


def test_a_sequence_continues_over_documents_and_files(tmp_path: Path) -> None:
    first = packed(write_texts(tmp_path / "a", "abcde", "fgh"), tmp_path / "a.tokens")
    second = packed(write_texts(tmp_path / "b", "klm", "nopqrstu"), tmp_path / "b.tokens")
    cut = sequences([first, second])
    assert cut.num == 2  # 23 tokens: a third sequence needs 25
    inputs, labels = cut.read(0)
    assert bytes(inputs.tolist()) == b"abcde\0fg"
    assert bytes(labels.tolist()) == b"bcde\0fgh"
    inputs, labels = cut.read(1)
    assert bytes(inputs.tolist()) == b"h\0klm\0no"
    assert bytes(labels.tolist()) == b"\0klm\0nop"


def test_every_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    text = bytes(range(1, 42))
    cut = sequences([packed(write_texts(tmp_path / "a", text), tmp_path / "a.tokens")])
    predicted = [label for n in range(cut.num) for label in cut.read(n)[1].tolist()]
    assert predicted == [*range(2, 42), 0][: cut.num * 8]


def test_prompts_are_inputs_but_are_not_predicted(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"q": "why", "a": "so"}, {"q": "how", "a": "thus"}])
    cut = sequences([packed(rows, tmp_path / "a.tokens", Columns("a", "q"))])
    inputs, labels = cut.read(0)
    assert bytes(inputs.tolist()) == b"whyso\0ho"
    no = NOT_LEARNED
    assert labels.tolist() == [no, no, *b"so\0", no, no, no]


def test_documents_end_with_their_end_token_and_with_files(tmp_path: Path) -> None:
    first = packed(write_texts(tmp_path / "a", "abcde", "fgh"), tmp_path / "a.tokens")
    second = packed(write_texts(tmp_path / "b", "klm", "nopqrstu"), tmp_path / "b.tokens")
    cut = sequences([first, second])
    assert bytes(cut.read(0)[0].tolist()) == b"abcde\0fg"
    assert cut.document_starts(0).tolist() == [0] * 6 + [6] * 2
    # The second file begins at its third token. The rest of a document is a document of its own.
    assert bytes(cut.read(1)[0].tolist()) == b"h\0klm\0no"
    assert cut.document_starts(1).tolist() == [0, 0, 2, 2, 2, 2, 6, 6]


def test_held_out_samples_follow_the_training_samples(tmp_path: Path) -> None:
    whole = sequences([packed(write_texts(tmp_path / "a", "x" * 100), tmp_path / "a.tokens")])
    held_out = Sequences(whole.row, 8, 9, whole.num - 9)
    assert held_out.read(0)[0].tolist() == whole.read(9)[0].tolist()


@pytest.mark.parametrize(
    ("tokens", "num"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (801, 100)]
)
def test_a_sequence_needs_one_token_more_than_its_length(tokens: int, num: int) -> None:
    assert num_sequences(tokens, 8) == num


@pytest.mark.parametrize(
    ("num", "fraction", "held_out"),
    [(100, None, 0), (100, 0.05, 5), (100, 0.001, 1), (3, 0.5, 2), (0, 0.5, 0)],
)
def test_a_fraction_holds_out_at_least_one(num: int, fraction: float | None, held_out: int) -> None:
    assert num_held_out(num, fraction) == held_out


def test_a_fingerprint_changes_with_the_files_and_the_held_out_part() -> None:
    one = fingerprint(["a", "b"], 10)
    assert one == fingerprint(["a", "b"], 10)
    assert one not in (fingerprint(["b", "a"], 10), fingerprint(["a", "b"], 9))
