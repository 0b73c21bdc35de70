"""Makes ndctl's calls in training frameworks, in scripts that do not make them."""
