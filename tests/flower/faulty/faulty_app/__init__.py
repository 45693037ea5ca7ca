"""An app whose client 1 fails on request."""
