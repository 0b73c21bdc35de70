"""Measurements of training, and the files and services that they are written to."""
