"""The public Python package `ndctl`."""
