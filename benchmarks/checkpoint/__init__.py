"""What a checkpoint on the disk costs training, beside torch's own asynchronous saves."""
