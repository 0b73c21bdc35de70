"""What an agent collects about its ranks when they hang or end."""
