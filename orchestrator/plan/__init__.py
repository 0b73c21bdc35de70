"""How a job is split over ranks, and which host plays which of them.

Pure functions of the standard library: no torch, no I/O, no clock. The seam is
`planner.plan(spec, inventory, config) -> Plan`; whatever plans better later keeps it.
"""
