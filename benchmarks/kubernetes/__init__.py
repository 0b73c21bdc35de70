"""A large Kubernetes cluster (`python -m benchmarks.kubernetes`), and faults on one."""
