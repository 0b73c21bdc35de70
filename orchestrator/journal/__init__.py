"""The journal of a job: append to it, replay it, and take snapshots of its fold."""
