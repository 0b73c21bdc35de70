"""What is measured of training, and where it is written."""
