"""Use cases about all jobs of a user or a site: find, list, wait for, remove."""
