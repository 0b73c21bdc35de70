"""The data: sources, tokens, the order of samples, and what each rank reads of them."""
