"""Runs the real agent and the real leader in a simulated cluster: the inside of their seams."""
