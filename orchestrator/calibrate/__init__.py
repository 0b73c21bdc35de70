"""From measured operations of the hosts at hand to a hardware profile. Pure."""
