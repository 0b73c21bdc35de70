"""transformers loads an exported model with bitwise equal weights and computes equal logits."""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.spec.model_spec import ModelSpec
from tests.trainer.checkpoint.checkpoint_launch import tensors_of, train_alone
from tests.trainer.checkpoint.checkpoint_worker import save_case
from tests.trainer.launch.tiny_runs import MODELS, tiny
from trainer.checkpoint.read import CheckpointReader
from trainer.checkpoint.state import MODEL
from trainer.export import files_of, main, parse_size
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import StageSlice
from trainer.model.init_weights import allocate
from trainer.rank.ranks import process_group

TOKENS_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=list(MODELS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job with four steps and two checkpoints."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    checkpoint = {"every_steps": 2, "async": False}
    assert (
        train_alone(tiny(out, model=request.param, steps=4, checkpoint=checkpoint)) == exit_codes.OK
    )
    return out


def export(run: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    """Export successfully; the tensors of all files."""
    assert main([str(run), "--out", str(out), *options]) == exit_codes.OK
    found: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        found |= load_file(file)
    return found


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights in the newest checkpoint."""
    tensors = tensors_of(run / "checkpoints")
    return {n.removeprefix(MODEL): t for n, t in tensors.items() if n.startswith(MODEL)}


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def trainer_logits(run: Path) -> torch.Tensor:
    """Logits of the trainer's model with the weights of the newest checkpoint."""
    origin = CheckpointReader(run / "checkpoints" / "step-4").progress().origin
    config = read_model_config(ModelSpec(config=origin.config))
    layers = config.num_hidden_layers
    (decoder,) = build_stages(config, [StageSlice(0, layers, layers)])
    allocate(decoder, torch.device("cpu"))
    decoder.set_positions(torch.arange(TOKENS_BT.shape[1]).unsqueeze(0))
    weights = weights_of(run)
    for name, parameter in decoder.plain_parameters():
        parameter.copy_(weights.pop(name))
    assert not weights
    logits: torch.Tensor = decoder(TOKENS_BT)
    return logits


def test_transformers_computes_the_same_logits(run: Path, tmp_path: Path) -> None:
    assert_same(export(run, tmp_path / "out"), weights_of(run))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(TOKENS_BT).logits
    torch.testing.assert_close(logits, trainer_logits(run), rtol=0, atol=1e-5)
    assert logits.std() > 0.1


def test_an_export_loaded_and_exported_again_is_bitwise_equal(run: Path, tmp_path: Path) -> None:
    first = export(run, tmp_path / "first", "--max-shard-size", "20KB")
    config = tiny(tmp_path / "again")
    config["model"] = {"path": str(tmp_path / "first"), "weights": str(tmp_path / "first")}
    with process_group(RankEnv()):
        save_case({"config": config, "to": tmp_path / "again" / "checkpoints"}, RankEnv())
    assert_same(export(tmp_path / "again", tmp_path / "second", "--step", "0"), first)
    read = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("first", "second")]
    assert read[0] == read[1]


def test_small_files_are_listed_in_an_index(run: Path, tmp_path: Path) -> None:
    assert_same(export(run, tmp_path / "out", "--max-shard-size", "20KB"), weights_of(run))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name for path in tmp_path.glob("out/*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_another_dtype_and_step_can_be_chosen(run: Path, tmp_path: Path) -> None:
    tensors = export(run, tmp_path / "out", "--step", "2", "--dtype", "bfloat16")
    now = weights_of(run)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert not torch.equal(tensors["model.norm.weight"], now["model.norm.weight"].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_refused_export_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(run: Path, *options: str) -> str:
        assert main([str(run), "--out", str(tmp_path / "out"), *options]) == exit_codes.REFUSED
        return capsys.readouterr().err

    assert "has no complete checkpoint" in refused(tmp_path)
    told = refused(run, "--step", "3")
    assert "COMPLETE is missing" in told
    assert "step-2, step-4" in told
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    shard = damaged / "checkpoints" / "step-4" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "is damaged: __0_0.distcp has another checksum" in refused(damaged)
    shard.write_bytes(bytes(len(content)))
    assert "failed to load" in refused(damaged, "--no-verify")
    assert {path.name for path in tmp_path.iterdir()} == {"damaged"}
    (tmp_path / "out").mkdir()
    assert "already exists" in refused(run)


def test_the_tokenizer_is_exported_with_the_weights(tmp_path: Path) -> None:
    words = {f"word{number}": number for number in range(97)} | {"?": 97, "end": 98}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    special = {"unk_token": "?", "eos_token": "end"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = tiny(tmp_path / "run", steps=1)
    config["data"]["tokenizer"] = str(folder)
    assert train_alone(config) == exit_codes.OK
    export(tmp_path / "run", tmp_path / "out")
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read("word5 word96 other")["input_ids"] == [5, 96, 97]


def test_tensors_go_into_files_in_order() -> None:
    sizes = {"a": 4, "b": 5, "c": 20, "d": 1, "e": 9}
    assert files_of(sizes, 100) == {"model.safetensors": ["a", "b", "c", "d", "e"]}
    assert list(files_of(sizes, 10).values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(files_of(sizes, 10)) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_sizes_are_parsed_with_units() -> None:
    assert [parse_size(text) for text in ("7", "5KB", "1.5 mb", "5GB")] == [
        7,
        5_000,
        1_500_000,
        5_000_000_000,
    ]
    for nonsense in ("", "0GB", "5 TB", "many"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(nonsense)


# PEFT uses an interface that transformers has deprecated.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_exported_for_peft(run: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    export(run, tmp_path / "base")
    config = tiny(tmp_path / "adapted", steps=2, optimizer={"lr": 0.1})
    lora = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
    base = str(tmp_path / "base")
    config["model"] = {"path": base, "weights": base, "lora": lora}
    assert train_alone(config) == exit_codes.OK
    trained = weights_of(tmp_path / "adapted")
    found = export(tmp_path / "adapted", tmp_path / "out")
    assert {tuple(tensor.shape) for tensor in found.values()} == {
        tuple(tensor.shape) for tensor in trained.values()
    }
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == base
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        bare = model(TOKENS_BT).logits
        adapted = PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()
        assert (adapted(input_ids=TOKENS_BT).logits - bare).abs().max() > 1e-3
