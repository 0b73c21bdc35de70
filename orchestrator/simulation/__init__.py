"""A cluster in one process and no time: drives the real supervisor through the faults of years.

One seed is one history. What decides is the real thing: `step` and all below it, diagnosis, policy,
hang detection, placement, the planner, the journal's lines. What only carries news and orders
(agents, leader, scheduler, network, storage, ranks) is played; each module says where it differs.
"""
