"""An app whose client 1 fails on request."""

MISBEHAVING = 1
"""The client that fails."""
