"""The job spec, a module for each part of it."""
