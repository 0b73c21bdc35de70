"""Where the time of a job goes: training that counts, and six causes of lost time."""
