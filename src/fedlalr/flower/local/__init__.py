"""Flower's processes on this machine: start, watch, stop."""
