"""What programs of a job tell each other: events, actions, and messages between leader, agent
and rank.
"""
