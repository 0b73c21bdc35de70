"""Values that orchestrator and trainer share: specs, messages and file formats."""
