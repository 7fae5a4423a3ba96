"""Launching: how one command becomes the workers of a run, and what each knows of the others."""
