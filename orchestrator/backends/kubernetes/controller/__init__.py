"""`ndctl controller`: one process in the cluster that does for many jobs what only an outside eye
can. Jobs do without it: it knows nothing that is not written on their objects, and keeps nothing.
"""
