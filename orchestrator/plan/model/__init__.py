"""What a model is made of, as far as its split, its memory and its speed depend on it."""
