"""What users bring from other tools: their files, manifests, batch scripts and command lines."""
