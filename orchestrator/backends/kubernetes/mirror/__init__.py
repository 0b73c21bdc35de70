"""A job seen from outside of its cluster: a copy of its journal, metrics and logs."""
