"""Planted faults, and what the tools say of them; see __main__.py."""
