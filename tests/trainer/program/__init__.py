"""What ndctl sees of a script that it runs."""
