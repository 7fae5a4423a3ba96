"""Hooks: what is told of the user's optimizers, and what is changed about them."""
