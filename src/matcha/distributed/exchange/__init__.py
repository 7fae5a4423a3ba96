"""Exchanges: one worker's part of a round on its buckets, over each kind of wire."""
