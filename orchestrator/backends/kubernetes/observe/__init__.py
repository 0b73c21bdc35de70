"""The state of a job, parsed from its Kubernetes objects. Pure."""
