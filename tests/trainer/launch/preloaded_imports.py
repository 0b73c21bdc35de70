"""The modules that ranks of tests import. They are imported once, before ranks are forked.

A module that starts a thread must not be imported here, because a fork does not copy threads.
"""

import tests.trainer.launch.training_worker  # noqa: F401
