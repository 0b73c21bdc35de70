"""Which host plays which node of a plan."""
