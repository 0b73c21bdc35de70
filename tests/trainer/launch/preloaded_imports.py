"""The modules that ranks of tests import. They are imported once, before ranks are forked.

A module that starts a thread must not be imported here, because a fork does not copy threads.
"""

import gc

# First, because it leaves out what an agent's fork server leaves out.
import trainer.imports  # noqa: F401

# isort: split
import tests.trainer.launch.training_worker  # noqa: F401

# Modules stay until the end. A rank collects garbage when its training begins, and would look at
# all of them for half a second.
gc.freeze()
