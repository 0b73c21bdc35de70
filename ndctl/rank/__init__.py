"""What a rank tells ndctl. Standard library only."""
