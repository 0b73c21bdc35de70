"""Files that are no YAML, or are for Kubernetes, and that a user gives as a job spec."""

from pathlib import PurePath

from orchestrator.errors import SpecError
from orchestrator.specs.foreign.pods.manifests import looks_like_manifest, training_in
from orchestrator.specs.foreign.taking_over import (
    command_for,
    is_script,
    nothing_in,
)


def foreign_text(text: str, path: PurePath) -> tuple[str, str] | None:
    """What a text is that is not YAML, and a fix; None: nothing known."""
    if path.suffix == ".toml":
        return "this is a TOML file, not a job spec in YAML", "`ndctl init` writes a job spec"
    if path.suffix == ".py":
        fix = f"ndctl run -- {path}, or a spec with run: {{script: {path}}}"
        return "this is a Python script, not a job spec", fix
    if is_script(text, path):
        what = "a batch script of Slurm" if "#SBATCH" in text else "a script of a shell"
        return f"this is {what}, not a job spec", TAKE_OVER.format(command_for(path))
    if looks_like_manifest(text):
        if not [*training_in(text)]:
            try:
                return nothing_in(text, path)
            except SpecError:  # what reads the spec says where it is not YAML
                return None
        kinds = ", ".join(dict.fromkeys(str(one["kind"]) for one, _ in training_in(text)))
        return (
            f"this is a Kubernetes manifest ({kinds}), not a job spec",
            TAKE_OVER.format(command_for(path)),
        )
    return None


TAKE_OVER = "`{}` writes a job spec from it, and names what it does not take"
