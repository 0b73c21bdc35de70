"""What ndctl needs of a POSIX system: file locks, private folders, limits, and calls that may
hang or fail for a while.
"""
