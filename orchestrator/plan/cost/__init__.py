"""What a step sends, and how long it takes."""
