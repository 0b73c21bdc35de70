"""Every way to split a job over its ranks, what rules each out, and which is best."""
