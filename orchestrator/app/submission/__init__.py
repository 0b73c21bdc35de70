"""From a spec to a job that its scheduler has: `ndctl submit`, `render`, and jobs in an
allocation.
"""
