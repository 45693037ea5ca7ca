"""What clients send back: reading it, checking it, reducing it."""
