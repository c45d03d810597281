"""Measurements of a checkout: suites, goals, a GPU's first hours, pages, raw results."""
