"""`torchrun -m trainer CONFIG`, or `python -m trainer CONFIG` for one rank alone."""

import os
import sys

from ndctl.rank.parent_death import die_with_parent
from orchestrator.contract.files.env import RankEnv
from trainer.process import start
from trainer.rank.environment import DRIVER, gpu_defaults, torch_defaults

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\nCONFIG: a JSON or YAML file, such as trainer-1.json\n")
        sys.exit(0)
    env = RankEnv.from_mapping(os.environ)  # noqa: TID251 (this is the entry point)
    gpu = DRIVER.exists() and not env.no_gpu
    defaults = {**torch_defaults(env), **gpu_defaults(os.environ, gpu=gpu)}  # noqa: TID251
    for name, value in defaults.items():
        os.environ.setdefault(name, value)  # noqa: TID251
    if "TORCHELASTIC_RUN_ID" in os.environ and not env.heartbeat_socket:  # noqa: TID251
        # Without ndctl's rank watcher, ranks would outlive a torchrun that SIGKILL ended. If it has
        # ended already, its rendezvous store is gone too, and this rank fails there.
        die_with_parent(os.getppid())
    code = start(sys.argv[1:], env)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # A normal exit joins all threads, and those may wait for other ranks. A failed rank must
        # end at once, so that its agent can report it.
        os._exit(code)
