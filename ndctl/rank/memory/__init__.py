"""The state of a script in the memory of its host: with the standard library, and with torch if the
script uses it."""
