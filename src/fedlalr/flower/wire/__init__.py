"""The wire format between server and clients: arrays, instructions, messages."""
