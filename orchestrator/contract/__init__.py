"""What orchestrator and trainer agree on: plain values, written once."""
