"""The stacks and dumps that ranks write."""
