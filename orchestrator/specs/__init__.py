"""Spec files around the loader: what each key means, overlays, variables, the user's settings."""
