"""The payload that a batch script carries."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.backends.slurm.on_nodes.embedded import PACKED, from_text, to_text
from orchestrator.backends.slurm.render import END, script
from orchestrator.contract.submission_payload import Handover, renamed
from orchestrator.errors import SpecError
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import a_launch


def a_handover() -> Handover:
    typed = {"spec": "/home/me/job.yaml", "overrides": ["train.steps=5"], "folder": ""}
    return replace(handover_of(a_launch()), spec="name: job\ntrain: {steps: 5}\n", submitted=typed)


def test_the_embedded_payload_is_read_as_it_was_submitted() -> None:
    assert from_text(to_text(a_handover())) == a_handover()
    assert from_text(to_text(a_handover()) + "\n") == a_handover()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_text_in_a_spec_ends_the_script_or_is_run_by_it(said: str) -> None:
    """The payload is in a here-document. The shell expands nothing in it."""
    spec = "name: job\nresilience: " + json.dumps(said) + "\n"
    handover = replace(a_handover(), spec=spec)
    text = script(handover, "python", Path("/home/me"))
    assert f"<<'{END}'" in text
    assert text.split("\n").count(END) == 1
    carried = text.partition(f"<<'{END}' || exit\n")[2].partition(f"\n{END}\n")[0]
    assert from_text(carried) == handover


def test_the_same_job_makes_the_same_script_at_any_time() -> None:
    later = replace(a_handover(), job=replace(a_handover().job, at=5.0))
    cwd = Path("/home/me")
    assert script(later, "python", cwd) == script(a_handover(), "python", cwd)


def test_a_spec_that_was_edited_in_the_script_is_refused() -> None:
    edited = to_text(a_handover()).replace("steps: 5", "steps: 6")
    with pytest.raises(SpecError, match="the spec in this script was edited") as refused:
        from_text(edited)
    assert "ndctl render" in refused.value.fix


@pytest.mark.parametrize(
    "text", ["", "name: job\n", f"name: job\n{PACKED}\n", f"a\n{PACKED}\nAAAA"]
)
def test_text_that_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="cannot read the job") as refused:
        from_text(text)
    assert "ndctl render" in refused.value.fix


def test_a_job_in_another_run_directory_has_its_name_from_it() -> None:
    other = renamed(a_handover(), Path("/runs/job-3"))
    assert (other.launch.job, other.launch.run_dir) == ("job-3", "/runs/job-3")
    assert other.spec == "name: 'job-3'\ntrain: {steps: 5}\n"
    assert other.trainer["out"] == "/runs/job-3"
    assert other.submitted is not None
    assert other.submitted["overrides"] == ["train.steps=5", "name=job-3"]
    assert renamed(a_handover(), Path("/runs/job")) == a_handover()
