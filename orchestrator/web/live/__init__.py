"""Serves pages, and sends what changes on those that are open."""
