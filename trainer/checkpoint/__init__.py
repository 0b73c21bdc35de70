"""Checkpoints: what they hold, how they are written and completed, and how a job goes on."""
