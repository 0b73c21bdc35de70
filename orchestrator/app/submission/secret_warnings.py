"""Warnings about secrets in a spec."""

from collections.abc import Iterator

from orchestrator.contract.spec.job_spec import CommonSpec
from orchestrator.contract.spec.kubernetes_spec import plain_secrets
from orchestrator.contract.spec.slurm_spec import plain_secrets as plain_on_slurm


def secret_warnings(spec: CommonSpec) -> Iterator[str]:
    """A warning for each environment variable that looks like a secret and is plain text."""
    for key in plain_on_slurm(spec.cluster.slurm) if spec.cluster.backend == "slurm" else ():
        name = key.rpartition(".")[2]
        yield (
            f"cluster.slurm.{key} looks like a secret. It is stored as plain text in the spec, the"
            " run directory and the batch script, which Slurm also keeps\n"
            "  fix: write it to a file that only you can read, and add"
            f" `- export {name}=$(cat FILE)` to cluster.slurm.setup"
        )
    kubernetes, job = spec.cluster.kubernetes, spec.name
    for key in plain_secrets(kubernetes) if spec.cluster.backend == "kubernetes" else ():
        name = key.rpartition(".")[2]
        of = f"-n {kubernetes.namespace} " if kubernetes.namespace else ""
        yield (
            f"cluster.kubernetes.{key} looks like a secret. It is stored as plain text in the spec,"
            f" the run directory and ConfigMap {job}-launch\n"
            f"  fix: `kubectl {of}create secret generic {job}-env --from-literal={name}=…`, and set"
            f" cluster.kubernetes.env: {{{name}: {{secret: {job}-env, key: {name}}}}}"
        )
