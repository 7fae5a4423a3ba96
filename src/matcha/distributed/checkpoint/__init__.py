"""Saving: workers' states as files."""
