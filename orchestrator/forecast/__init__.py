"""What to expect of a job over weeks: a pure model of its failures, and the closed form beside it.

No clock, no I/O but the table of rates. It does not drive the supervisor (`simulation/` does).
"""
