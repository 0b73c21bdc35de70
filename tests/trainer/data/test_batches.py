"""A step reads the same sequences on every mesh. The mesh only decides which rank reads which."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data.data_files import packed, sequences, write_rows, write_texts
from trainer.data.batches import Batches, MicroBatch
from trainer.data.ledger import NOTHING, Sums
from trainer.data.packing.documents import Columns
from trainer.data.sequences import Sequences
from trainer.model.chunked_loss import NOT_LEARNED


@pytest.fixture
def train(tmp_path: Path) -> Sequences:
    text = "".join(chr(32 + i * i % 90) for i in range(4000))
    return sequences([packed(write_texts(tmp_path / "texts", text), tmp_path / "x.tokens")])


def batches_of(train: Sequences, **changes: Any) -> Batches:
    values: dict[str, Any] = {
        "train": train,
        "validation": None,
        "fingerprint": "",
        "seed": 3,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "data_parallel": 1,
        "data_rank": 0,
        "counts_in_ledger": True,
        "positions_T": torch.arange(8),
        "device": torch.device("cpu"),
    }
    return Batches(**{**values, **changes})


def rows_of(micro_batches: list[MicroBatch]) -> list[tuple[list[int], list[int]]]:
    pairs = ((m.inputs_BT.tolist(), m.labels_BT.tolist()) for m in micro_batches)
    return [row for inputs, labels in pairs for row in zip(inputs, labels, strict=True)]


def add(sums: list[Sums]) -> Sums:
    return Sums(*map(sum, zip(*sums, strict=True)))


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_every_mesh_reads_the_same_samples_in_a_step(
    train: Sequences, data_parallel: int, micro_batch_size: int
) -> None:
    def read(step: int, parallel: int, micro: int) -> tuple[list[Any], Sums]:
        ranks = [
            batches_of(train, data_parallel=parallel, data_rank=rank, micro_batch_size=micro)
            for rank in range(parallel)
        ]
        rows = sorted(row for rank in ranks for row in rows_of(rank.of_step(step)))
        return rows, add([rank.read_step(step).read for rank in ranks])

    for step in (1, 2):
        rows, sums = read(step, data_parallel, micro_batch_size)
        expected_rows, expected_sums = read(step, 1, 16)
        assert rows == expected_rows
        assert (sums.samples, sums.hash) == (16, expected_sums.hash)
    assert read(1, 1, 16) != read(2, 1, 16)


def test_a_rank_reads_its_tokens_and_the_next_token_of_each(train: Sequences) -> None:
    whole = rows_of(batches_of(train).of_step(1))
    part = rows_of(batches_of(train, positions_T=torch.tensor([1, 2, 6])).of_step(1))
    for (inputs, labels), (some_inputs, some_labels) in zip(whole, part, strict=True):
        assert some_inputs == [inputs[1], inputs[2], inputs[6]]
        assert some_labels == [labels[1], labels[2], labels[6]] == [inputs[2], inputs[3], inputs[7]]


def test_of_ranks_that_read_the_same_data_one_records_it(train: Sequences) -> None:
    assert batches_of(train, counts_in_ledger=False).read_step(1).read == NOTHING


def test_labels_of_prompts_are_not_learned(tmp_path: Path) -> None:
    rows = [{"q": "ask", "a": "say"} for _ in range(20)]
    file = packed(write_rows(tmp_path / "a.jsonl", rows), tmp_path / "x.tokens", Columns("a", "q"))
    micro = batches_of(sequences([file]), global_batch_size=2).of_step(1)[0]
    assert (micro.labels_BT == NOT_LEARNED).any()
    assert not (micro.inputs_BT == NOT_LEARNED).any()


@pytest.mark.parametrize("asked", [None, 1, 21, 1000])
@pytest.mark.parametrize(("data_parallel", "micro_batch_size"), [(1, 1), (1, 4), (2, 2), (4, 4)])
def test_an_evaluation_reads_the_same_tokens_on_every_mesh(
    train: Sequences, asked: int | None, data_parallel: int, micro_batch_size: int
) -> None:
    held_out = Sequences(train.row, 8, 400, 37)
    ranks = [
        batches_of(
            train,
            validation=held_out,
            data_parallel=data_parallel,
            data_rank=rank,
            micro_batch_size=micro_batch_size,
        )
        for rank in range(data_parallel)
    ]
    num = min(asked or 37, 37)
    groups = [[*rank.evaluation(asked)] for rank in ranks]
    accumulation = 16 // (data_parallel * micro_batch_size)
    assert [[len(group) for group in rank] for rank in groups] == [
        [accumulation] * -(-num // 16) for _ in ranks
    ]
    rows = [row for rank in groups for group in rank for row in rows_of(group)]
    real = sorted(row for row in rows if row[1] != [NOT_LEARNED] * 8)
    assert real == sorted(
        tuple(part.tolist() for part in held_out.read(place)) for place in range(num)
    )
    assert all(row[0] == [0] * 8 for row in rows if row[1] == [NOT_LEARNED] * 8)


def test_without_held_out_data_there_is_nothing_to_evaluate(train: Sequences) -> None:
    assert [*batches_of(train).evaluation(None)] == []


def test_micro_batches_have_documents_of_whole_sequences_and_positions_of_a_rank(
    tmp_path: Path,
) -> None:
    texts = write_texts(tmp_path / "texts", *("x" * (number % 7) for number in range(1, 60)))
    train = sequences([packed(texts, tmp_path / "x.tokens")])
    positions_T = torch.tensor([0, 1, 6, 7])
    masked = {"masks_documents": True, "global_batch_size": 4, "validation": train}
    rank = batches_of(train, positions_T=positions_T, **masked)
    for micro in (*rank.of_step(1), *(m for group in rank.evaluation(4) for m in group)):
        assert micro.documents is not None
        starts_BS = micro.documents.starts_BS
        assert starts_BS.shape == (2, 8)
        own_BT = micro.documents.positions_BT
        assert torch.equal(own_BT, positions_T - starts_BS[:, positions_T])
        # An end token is followed by position 0.
        after_end = micro.inputs_BT[:, 2] == 0
        assert (own_BT[after_end, 3] == 0).all()
    assert batches_of(train).of_step(1)[0].documents is None
