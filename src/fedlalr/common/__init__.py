"""Helpers for every package: checks, suggestions, atomic file writes, colours. Imports no other package of fedlalr."""
