"""The leader's tasks on Kubernetes: watch its job object, and report the state of the job."""
