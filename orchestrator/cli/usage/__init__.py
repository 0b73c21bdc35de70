"""What `ndctl --help` shows, and what ndctl says about names that it does not know."""
