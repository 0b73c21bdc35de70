"""What only the leader of a job does: queue events, keep the agents' connections, call the
scheduler, write snapshots.
"""
