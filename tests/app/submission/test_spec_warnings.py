"""Valid specs that few users want get a warning."""

from msgspec.structs import replace

from orchestrator.app.submission.spec_warnings import spec_warnings
from orchestrator.contract.plan import Plan
from tests.agent.world import a_plan
from tests.app.submission.test_inputs import spec


def test_packed_prompts_and_answers_get_a_warning() -> None:
    assert [*spec_warnings(spec())] == []
    (said,) = spec_warnings(spec("data.format=jsonl", "data.prompt_column=question"))
    assert said.startswith("data.prompt_column=question: prompts and answers are packed")
    assert "without masks between documents" in said


def test_float32_gets_a_warning_on_a_gpu_alone() -> None:
    asked = spec("train.dtype=float32")
    assert [*spec_warnings(asked, on("cpu"))] == []
    assert [*spec_warnings(spec("train.dtype=auto"), on("h100-sxm-80gb"))] == []
    (said,) = spec_warnings(asked, on("h100-sxm-80gb"))
    assert said.startswith("train.dtype=float32 on h100-sxm-80gb: the trainer does not use TF32")
    assert "fix: remove train.dtype" in said


def on(profile: str) -> Plan:
    return replace(a_plan(), profile=profile)
