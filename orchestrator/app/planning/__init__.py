"""From a spec to its plan: for `ndctl plan` and `forecast`, and again while a job runs."""
