"""What all tests share."""

from hypothesis import settings

pytest_plugins = [
    "tests.slurm.testbed",
    "tests.kubernetes.provision",
    "tests.kubernetes.testbed",
]

# Times on a loaded machine say nothing about the code.
settings.register_profile("ndctl", deadline=None)
settings.load_profile("ndctl")
