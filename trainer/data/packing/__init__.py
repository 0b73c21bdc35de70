"""Packs documents of any supported source into token files."""
