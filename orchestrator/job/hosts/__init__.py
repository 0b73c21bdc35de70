"""Which hosts a job has: agents that come and go, spares, replacements, hosts given back."""
