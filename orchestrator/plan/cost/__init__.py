"""The cost model: the traffic and the time of an optimizer step."""
