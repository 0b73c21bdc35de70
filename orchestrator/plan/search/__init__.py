"""Finds the best mesh for a job: rules, search and alternatives."""
