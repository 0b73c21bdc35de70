"""Finds the culprit of a hang: from dumps and stacks to a verdict. Pure."""
