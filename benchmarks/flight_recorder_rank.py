"""A rank of `benchmarks/flight_recorder.py`."""

import sys

from benchmarks.flight_recorder import rank

if __name__ == "__main__":
    rank(int(sys.argv[1]))
