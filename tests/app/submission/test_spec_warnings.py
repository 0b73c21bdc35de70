"""Valid specs that few users want get a warning."""

from msgspec.structs import replace

from orchestrator.app.submission.spec_warnings import spec_warnings
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan
from tests.agent.world import a_plan
from tests.app.submission.test_inputs import spec


def test_packed_prompts_and_answers_without_masks_get_a_warning() -> None:
    assert [*spec_warnings(spec())] == []
    prompts = ("data.format=jsonl", "data.prompt_column=question")
    (said,) = spec_warnings(spec(*prompts, "data.document_mask=false"))
    assert said.startswith("data.prompt_column=question with data.document_mask=false: prompts")
    assert "without masks between documents" in said
    assert [*spec_warnings(spec(*prompts))] == [], "they have masks unless the spec says otherwise"


def test_float32_gets_a_warning_on_a_gpu_alone() -> None:
    asked = spec("train.dtype=float32")
    assert [*spec_warnings(asked, on("cpu"))] == []
    assert [*spec_warnings(spec("train.dtype=auto"), on("h100-sxm-80gb"))] == []
    (said,) = spec_warnings(asked, on("h100-sxm-80gb"))
    assert said.startswith("train.dtype=float32 on h100-sxm-80gb: the trainer does not use TF32")
    assert "fix: remove train.dtype" in said


def test_kept_ranks_get_a_warning_on_a_gpu_where_they_were_never_tried() -> None:
    asked = spec("resilience.keep_ranks=true")
    assert [*spec_warnings(asked, on("cpu"))] == []
    (said,) = spec_warnings(asked, on("h100-sxm-80gb"))
    assert said.startswith("resilience.keep_ranks=true on h100-sxm-80gb: ranks were kept on CPUs")


def test_a_batch_that_rules_out_data_parallelism_gets_a_warning() -> None:
    odd = spec("train.global_batch_size=7", "parallel={}")
    (said,) = spec_warnings(odd, replace(a_plan(), mesh=Mesh(pp=2, cp=2)))
    assert said.startswith("train.global_batch_size=7: no data parallelism on 4 ranks, because 7")
    assert "the plan is pp=2 x cp=2\n  fix: set train.global_batch_size to a multiple of 4" in said
    # One data-parallel rank is what these specs ask for.
    fixed = spec("train.global_batch_size=7", "parallel={pp: 2, cp: 2}")
    assert [*spec_warnings(fixed, replace(a_plan(), mesh=Mesh(pp=2, cp=2)))] == []
    ddp = spec("train.global_batch_size=7", "parallel={dp_replicate: 1, dp_shard: 1}")
    assert [*spec_warnings(ddp, replace(a_plan(), mesh=Mesh(pp=2, cp=2)))] == []


def test_a_micro_batch_as_large_as_the_batch_gets_the_same_warning() -> None:
    whole = spec("train.global_batch_size=8", "train.micro_batch_size=8", "parallel={}")
    (said,) = spec_warnings(whole, replace(a_plan(), mesh=Mesh(tp=4)))
    assert "train.micro_batch_size=8: no data parallelism on 4 ranks, because 1 micro batch" in said
    assert "a multiple of 32, such as 32" in said


def on(profile: str) -> Plan:
    return replace(a_plan(), profile=profile)
