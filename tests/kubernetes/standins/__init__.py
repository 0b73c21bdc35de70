"""Stand-ins for kubelets, containers and operators on a real Kubernetes API server."""
