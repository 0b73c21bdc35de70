"""Health checks of a host: before a job, before its ranks start, and after a failure.

`machine.py` serves `ndctl doctor`. An agent runs `host_check.py` before it registers, and
`host_probes.py` after a failure. `gpus.py` and `links.py` check devices and networks;
`clocks_and_names.py` has the checks that need two hosts. The checks take milliseconds and do not
import torch. Commands run through a Shell, and files are read below a root, for tests.
"""
