"""The pages of fleet, job and incident: pure functions from a state to HTML."""
