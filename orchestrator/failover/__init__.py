"""What the agents of an allocation do when its leader is gone: follow the next one, become it,
or hand the job back.
"""
