"""The samples that trainings read over restarts and meshes, and data that they refuse."""

import io
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.files import exit_codes
from tests.trainer.data.data_files import save_tokenizer, write_rows
from tests.trainer.launch.tiny_runs import finish, losses_of, tiny, train, work
from trainer.data.__main__ import main

pytestmark = pytest.mark.process


def ledger_of(out: Path) -> tuple[int, str]:
    said = io.StringIO()
    code = main(["ledger", str(out)], said, said)
    return code, said.getvalue()


def with_rows(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    rows = [{"ask": f"what is {n} squared?", "say": f"it is {n * n}"} for n in range(400)]
    files = write_rows(folder / "rows.jsonl", rows)
    data = {"files": files, "prompt_column": "ask", "column": "say", "sequence_length": 32}
    return {**config, "data": {**data, "validation": {"fraction": 0.1}}}


def test_every_sample_is_read_once_over_restarts_and_meshes(tmp_path: Path) -> None:
    out, broken = tmp_path / "moved", tmp_path / "broken"
    first = with_rows(tiny(out, steps=8, parallel={"dp_shard": 2}), tmp_path)
    second = {**first, "parallel": {"tp": 2}, "micro_batch_size": 4}
    work(
        tmp_path,
        2,
        [
            {"config": first, "stop_after": 3},
            {"config": second, "stop_after": 6},
            {
                "config": with_rows(tiny(broken, steps=2, parallel={"dp_shard": 2}), tmp_path),
                "broken": "all ranks read the same",
            },
        ],
    )
    whole = with_rows(tiny(tmp_path / "whole", steps=8), tmp_path)
    work(tmp_path, 1, [{"config": {**first, "parallel": {}}}, {"config": whole}])
    code, said = ledger_of(out)
    assert code == 0, said
    assert "each of the 8 valid steps (from 3 starts) read exactly its 4 samples" in said
    expected = losses_of(tmp_path / "whole")
    assert all(abs(loss - expected[step]) <= 1e-5 for step, loss in losses_of(out).items())
    code, said = ledger_of(broken)
    assert code == exit_codes.FAILED
    assert "step 1: it read wrong samples" in said
    # Only the first start packed the data.
    assert [path.name for path in (out / "tokens").iterdir()] == ["train.tokens"]


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = tiny(out, parallel={"dp_shard": 2})
    words = (f"word{n}" for n in range(300))
    config["data"]["tokenizer"] = save_tokenizer(tmp_path / "tokenizer", words)
    ranks = train(config, 2)
    assert finish(ranks) == [exit_codes.REFUSED, exit_codes.REFUSED]
    assert "vocab_size is 256, but the tokenizer has 302 tokens" in ranks[0].output
    assert "vocab_size" in ranks[1].output, "its own log is what a person is sent to"
    assert not (out / "tokens").exists()


def test_a_resume_on_changed_data_is_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out", steps=2)
    work(tmp_path, 1, [{"config": config}])
    with Path(config["data"]["files"]).with_name("0.txt").open("a") as text:
        text.write("more")
    ranks = train({**config, "train": {**config["train"], "steps": 4}}, 1)
    assert finish(ranks) == [exit_codes.REFUSED]
    assert "belongs to a run with other data or settings: the training files" in ranks[0].output
