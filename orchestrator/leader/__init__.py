"""What only the leader of a job does: queue events, hold the agents' sessions, call the
scheduler, write snapshots.
"""
