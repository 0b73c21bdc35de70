"""What a step reads is a function of seed and step; the mesh only deals it out."""

import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.contract.data import DataSpec
from orchestrator.errors import TrainingError
from trainer.data.batches import Batches
from trainer.data.corpus import Corpus, find_corpus, find_files
from trainer.data.order import permute, sample_at


def corpus_of(folder: Path, *texts: str, length: int = 8) -> Corpus:
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return find_corpus(DataSpec(files=str(folder / "*.txt"), sequence_length=length), 1)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_the_order_of_an_epoch_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(num_samples=st.integers(1, 500), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9))
def test_no_sample_repeats_within_an_epoch(num_samples: int, seed: int, epoch: int) -> None:
    begin = epoch * num_samples
    seen = [sample_at(p, num_samples, seed) for p in range(begin, begin + num_samples)]
    assert len(set(seen)) == num_samples


def test_epochs_and_seeds_differ_in_their_order() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [sample_at(epoch * 100 + p, 100, seed) for p in range(100)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != list(range(100))


@pytest.mark.parametrize("data_parallel", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_every_mesh_reads_the_same_samples_in_a_step(
    tmp_path: Path, data_parallel: int, micro_batch_size: int
) -> None:
    corpus = corpus_of(tmp_path, "".join(chr(32 + i * i % 90) for i in range(4000)))

    def read(data_parallel: int, micro_batch_size: int, step: int) -> list[list[int]]:
        rows = []
        for rank in range(data_parallel):
            batches = Batches(
                corpus=corpus,
                seed=3,
                global_batch_size=16,
                micro_batch_size=micro_batch_size,
                data_parallel=data_parallel,
                data_rank=rank,
                positions_T=torch.arange(8),
                device=torch.device("cpu"),
            )
            for micro in batches.of_step(step):
                rows += micro.inputs_BT.tolist()
        return sorted(rows)

    for step in (1, 2):
        assert read(data_parallel, micro_batch_size, step) == read(1, 16, step)
    assert read(1, 16, 1) != read(1, 16, 2)


def test_a_sequence_runs_on_from_one_file_into_the_next(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "abcde", "", "fghij", "klmnopqrs")
    assert corpus.num_samples == 2
    assert bytes(corpus.tokens(0)) == b"abcdefghi"
    assert bytes(corpus.tokens(1)) == b"ijklmnopq"


def test_a_rank_reads_its_tokens_and_the_ones_after_them(tmp_path: Path) -> None:
    batches = Batches(
        corpus=corpus_of(tmp_path, "abcdefghi"),
        seed=0,
        global_batch_size=1,
        micro_batch_size=1,
        data_parallel=1,
        data_rank=0,
        positions_T=torch.tensor([1, 2, 6]),
        device=torch.device("cpu"),
    )
    (micro,) = batches.of_step(1)
    assert bytes(micro.inputs_BT[0].tolist()) == b"bcg"
    assert bytes(micro.labels_BT[0].tolist()) == b"cdh"


def test_no_data_and_too_little_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="matches no file"):
        find_corpus(DataSpec(files=str(tmp_path / "*.txt"), sequence_length=8), 1)
    corpus_of(tmp_path, "abcdefghijkl")
    with pytest.raises(TrainingError, match="holds 1 sequences of 8 tokens"):
        find_corpus(DataSpec(files=str(tmp_path / "*.txt"), sequence_length=8), 2)


def test_a_file_that_shrank_is_noticed(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, "abcdefghi")
    (tmp_path / "0.txt").write_text("abc")
    with pytest.raises(TrainingError, match="shorter than rank 0 saw"):
        corpus.tokens(0)


def test_stdlib_stands_for_pythons_library_without_what_pip_installed() -> None:
    stdlib = sysconfig.get_paths()["stdlib"]
    found = find_files("{stdlib}/**/*.py")
    assert found == sorted(found)
    assert f"{stdlib}/json/decoder.py" in found
    assert not any("-packages/" in path for path in found)
