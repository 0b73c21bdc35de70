"""Commands about the text of a spec: what its keys mean, and a first one to start from."""
