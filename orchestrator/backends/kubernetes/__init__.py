"""The Kubernetes backend: renders, submits, watches and finds jobs whose hosts are pods."""
