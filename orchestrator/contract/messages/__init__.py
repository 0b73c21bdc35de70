"""Messages between the programs of a job: events, actions, and the protocols of leader, agent and
rank.
"""
