"""The screen with keys of `ndctl dashboard`: pure functions draw pages, textual shows them."""
