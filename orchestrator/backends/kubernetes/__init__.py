"""Kubernetes: a custom resource that an operator turns into one pod a host.

`render` makes its text and `observe` reads what Kubernetes says, both pure; `api` is the edge;
`task` is what runs in a pod; `backend` ties them to the cluster, `mirror` shows jobs from outside.
"""
