"""The live dashboard: frames drawn from a view, and the loop that draws them."""
