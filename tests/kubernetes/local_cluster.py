"""A Kubernetes control plane for use by hand, which runs until it is stopped.

`python -m tests.kubernetes.local_cluster start [DIR]` starts it and `stop [DIR]` stops it. Other
verbs are sent to the stand-ins, for example `lose-node DIR node=node2`.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.kubernetes.provision import assets
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.testbed import KubeTestbed

HELP = """\
{version} runs in {folder}: 4 nodes x 2 fake GPUs in 2 racks, with the CRDs of
PyTorchJob, JobSet and TrainJob. Pods are processes on this machine. Type
  export KUBECONFIG={folder}/kubeconfig PATH={binaries}:$PATH
  kubectl get nodes -L topology.kubernetes.io/rack
  .venv/bin/ndctl inventory --backend kubernetes
  kubectl apply -k manifests/base && kubectl -n ndctl apply -f manifests/examples/runs-claim.yaml
  .venv/bin/ndctl submit examples/kubernetes.yaml --follow
  .venv/bin/python -m tests.kubernetes.local_cluster lose-node {folder} node=node2  # and node-back
  .venv/bin/python -m tests.kubernetes.local_cluster stop {folder}
The log is {folder}/standins.log. The directory for hostPath volumes is {folder}/runs.
"""


def main(verb: str, *args: str) -> None:
    folder = Path(args[0] if args else Path(tempfile.gettempdir()) / "ndctl-kubernetes").absolute()
    # The address depends on the process id, so that it rarely equals that of a test's testbed.
    testbed = KubeTestbed(folder, Shape(net=16 + os.getpid() % 230), assets(), keep_running=True)
    match verb:
        case "start":
            folder.mkdir(parents=True, exist_ok=True)
            testbed.start()
            sys.stdout.write(
                HELP.format(folder=folder, binaries=testbed.binaries, version=testbed.version)
            )
        case "stop":
            testbed.stop()
        case _:
            what = dict(arg.partition("=")[::2] for arg in args[1:])
            sys.stdout.write(f"{testbed.order(verb, **what)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
