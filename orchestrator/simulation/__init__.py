"""A cluster in virtual time: runs the real leaders and agents through the faults of years.

One seed is one history. The real code decides and carries news and orders: `Leader`, `Agent`,
failover and all below them. Scheduler, operator, network, storage, clocks and ranks are simulated;
each module says where it differs from the real thing.
"""
