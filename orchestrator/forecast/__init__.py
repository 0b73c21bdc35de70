"""Forecasts a job over weeks: a pure model of its failures, and a closed form to check it.

It reads no clock and no file except the table of failure rates. It does not run the supervisor;
`simulation/` does that.
"""
