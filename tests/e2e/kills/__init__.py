"""Ranks, agents and hosts that are killed, one after the other and together."""
