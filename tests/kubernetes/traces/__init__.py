"""Recordings of what Kubeflow's training operator does to a job, and the code that makes them."""
