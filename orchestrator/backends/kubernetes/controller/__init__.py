"""`ndctl controller`: one process in the cluster that does for many jobs what only an outside eye
can, and what their pods may not. Jobs run without it. It knows nothing that is not written on
objects of the cluster, and keeps nothing.
"""
