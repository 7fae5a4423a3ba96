"""Connections of our own: one per link of the topology, with TLS and certificates if wanted."""
