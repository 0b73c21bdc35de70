"""Plans a job: how it is split over ranks, and which host runs which ranks.

Pure functions: no torch, no I/O, no clock. The interface is
`planner.plan(spec, inventory, config) -> Plan`.
"""
