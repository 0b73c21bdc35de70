"""Manifests of Kubernetes as specs: which pods they create, and what of these a spec says."""
