"""What a Kubernetes API says of nodes and pods, from its JSON to values; nothing here asks one."""
