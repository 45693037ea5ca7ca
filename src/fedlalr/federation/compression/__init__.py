"""Compression of what travels: codecs for slots, and how often a slot is sent."""
