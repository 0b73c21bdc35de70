"""The scripts of examples/scripts, one for each training framework, as supervised jobs."""
