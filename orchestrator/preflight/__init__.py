"""Is a host fit to run ranks? Asked by its agent before it registers, and by the leader then.

`host.py` puts the question; `devices.py` and `links.py` know what to look at; `together.py` is
what only two hosts can tell. Milliseconds and no torch; commands go through a Shell, and files lie
below a root.
"""
