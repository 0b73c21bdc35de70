"""`ndctl controller`: the controller of a Kubernetes cluster."""

import os

import click


@click.command(epilog="Example: ndctl controller --namespace training --once")
@click.option("--context", metavar="C", help="Context of the kubeconfig. [current context]")
@click.option(
    "-n", "--namespace", metavar="NS", help="Namespace of the jobs. [of the context or the pod]"
)
@click.option(
    "-A",
    "--all-namespaces",
    is_flag=True,
    help="Jobs of all namespaces. The Lease stays in one namespace.",
)
@click.option(
    "--taint", is_flag=True, help="Taint nodes that a job excluded, to keep other pods off."
)
@click.option("--once", is_flag=True, help="Exit when there is nothing left to do.")
@click.option(
    "--lease-duration",
    type=click.IntRange(min=3),
    default=15,
    show_default=True,
    metavar="S",
    help="Seconds after which another controller takes over from one that died.",
)
def controller(
    context: str | None,
    namespace: str | None,
    all_namespaces: bool,
    taint: bool,
    once: bool,
    lease_duration: int,
) -> None:
    """Run the controller of a Kubernetes cluster.

    It deletes pods of dead nodes, cleans up after jobs, and does what pods request but may not do
    themselves. Jobs run without it. manifests/controller/ has a Deployment. Of several controllers
    one is active.
    """
    from orchestrator.backends.kubernetes.api.client import Api
    from orchestrator.backends.kubernetes.controller.decide import Scope
    from orchestrator.backends.kubernetes.controller.loop import serve
    from orchestrator.system import SystemClock, log_to_stderr

    log_to_stderr()
    api = Api(context, os.environ, SystemClock())
    home = namespace or api.namespace
    scope = Scope(home=home, namespace=None if all_namespaces else home, taint=taint)
    serve(api, scope, duration_s=lease_duration, once=once)
