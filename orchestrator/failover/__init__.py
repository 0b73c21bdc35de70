"""What the agents of an allocation do when the leader is gone: follow the next leader, become it,
or requeue the job.
"""
