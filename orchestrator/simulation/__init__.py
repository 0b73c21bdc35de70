"""A simulated cluster in virtual time, which tests the real leaders and agents against faults.

One seed gives one history. `Leader`, `Agent`, failover and the code that they use are real.
Scheduler, operator, network, storage, clocks and ranks are simulated; each module says where it
differs from the real one.
"""
