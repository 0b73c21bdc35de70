"""The user's own programs, supervised without a line of them being changed."""
