"""What travels between the two: arrays, instructions, messages."""
