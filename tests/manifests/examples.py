"""manifests/examples, rendered: `python -m tests.manifests.examples` rewrites them."""

from pathlib import Path

from orchestrator.app.planning import plans
from orchestrator.app.submission import payload
from orchestrator.backends.kubernetes.render import objects, text
from orchestrator.job.state import Run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "manifests" / "examples"
EXAMPLES = {
    "pytorchjob": ("kubernetes", ()),
    "jobset": ("kubernetes", ("cluster.kubernetes.kind=jobset",)),
    "trainjob": ("kubernetes", ("cluster.kubernetes.kind=trainjob",)),
    "rdma": ("kubernetes-rdma", ()),
}
"""Name of the manifest -> the spec below examples/, and what is set besides."""


def rendered(name: str) -> str:
    spec, overrides = EXAMPLES[name]
    kind = next((f" --kind {one.rpartition('=')[2]}" for one in overrides), "")
    path = ROOT / "examples" / f"{spec}.yaml"
    planned = plans.plan_spec(path, overrides, {}, purpose="render")
    submission = payload.Submission(planned=planned, run_root=Path("/nowhere"))
    job = payload.submitted_event(submission, Run(), 0.0)
    command = f"ndctl render examples/{spec}.yaml{kind}"
    return f"# {command}\n{text(objects(payload.handover_of(submission, job)))}\n"


if __name__ == "__main__":
    for example in EXAMPLES:
        (FOLDER / f"{example}.yaml").write_text(rendered(example))
