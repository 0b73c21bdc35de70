"""What broke and who did it: failure classes, and what dumps of stuck ranks amount to. Pure.

Reads no clock and asks no machine, and never imports torch: a dump is data.
"""
