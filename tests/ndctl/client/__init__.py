"""The Python API: submit jobs and look at them."""
