"""The first cause of an attempt's failure, from everything that was found out about it."""
