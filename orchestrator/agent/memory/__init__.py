"""Checkpoints in this host's memory: the slots of its ranks, and copies of those of other hosts.

The agent sends each complete slot to partner hosts while ranks train, keeps what other agents send,
and fetches what the next attempt needs. All bytes go through threads, so the agent's event loop
never waits for them.
"""
