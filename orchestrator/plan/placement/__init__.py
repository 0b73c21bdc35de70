"""Assigns hosts to the nodes of a plan."""
