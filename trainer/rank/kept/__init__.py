"""A rank whose process outlives an attempt: it leaves one and joins the next."""
