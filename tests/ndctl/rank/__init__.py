"""What a training script calls, in ranks."""
