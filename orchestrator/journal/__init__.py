"""The journal of a job: append it, replay it, fold it to a snapshot."""
