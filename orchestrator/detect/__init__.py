"""Detectors of hangs, stragglers and bad hosts, from heartbeats, step times and the fabric check.

Pure."""
