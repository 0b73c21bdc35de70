"""`ndctl controller`: an optional process in the cluster that helps all jobs with actions that
their own pods cannot or may not do. It has no state of its own: all that it knows is in the objects
of the cluster.
"""
