"""What all tests share."""

import signal

from hypothesis import settings

pytest_plugins = [
    "tests.slurm.testbed",
    "tests.kubernetes.provision",
    "tests.kubernetes.testbed",
]

# Times on a loaded machine say nothing about the code.
settings.register_profile("ndctl", deadline=None)
settings.load_profile("ndctl")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and every process of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
