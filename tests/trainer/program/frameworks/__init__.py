"""What ndctl adds to training frameworks."""
