"""What runs in a cluster beside jobs: `controller`."""

import os

import click


@click.command(epilog="Example: ndctl controller --namespace training --once")
@click.option("--context", metavar="C", help="Of the kubeconfig. [its current one]")
@click.option("-n", "--namespace", metavar="NS", help="Whose jobs. [the context's, the pod's own]")
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs of all; its Lease is in one.")
@click.option("--taint", is_flag=True, help="Keep other pods off nodes that a job left out.")
@click.option("--once", is_flag=True, help="End when nothing is left to be done.")
@click.option(
    "--lease-duration",
    type=click.IntRange(min=3),
    default=15,
    show_default=True,
    metavar="S",
    help="So long after the leading controller died, another one takes over.",
)
def controller(
    context: str | None,
    namespace: str | None,
    all_namespaces: bool,
    taint: bool,
    once: bool,
    lease_duration: int,
) -> None:
    """In a Kubernetes cluster: what pods ask for and may not do themselves; delete pods of dead
    nodes; clean up.

    Jobs run without it. manifests/controller/ has it as a Deployment. Several may run: one acts.
    """

    from orchestrator.backends.kubernetes.api.client import Api
    from orchestrator.backends.kubernetes.controller.decide import Scope
    from orchestrator.backends.kubernetes.controller.loop import serve
    from orchestrator.system import SystemClock, log_to_stderr

    log_to_stderr()
    api = Api(context, os.environ, SystemClock())
    home = namespace or api.namespace
    scope = Scope(home=home, namespace=None if all_namespaces else home, taint=taint)
    serve(api, SystemClock(), scope, duration_s=lease_duration, once=once)
