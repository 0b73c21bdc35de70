"""Whether a host is fit to run ranks: before a job, before its ranks start, and when they break.

`machine.py` is for a person; an agent asks `host_check.py` before it registers and `host_probes.py`
when something broke; `gpus.py` and `links.py` know what to look at; `clocks_and_names.py` is what
only two hosts can tell. Milliseconds and no torch; commands go through a Shell, and files lie below
a root.
"""
