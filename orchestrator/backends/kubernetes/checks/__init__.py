"""What stands in the way of a launch on Kubernetes, looked at before anything is made."""
