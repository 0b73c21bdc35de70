"""What orchestrator and trainer agree on: plain values of the standard library, written once."""
