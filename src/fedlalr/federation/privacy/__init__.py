"""Client-level differential privacy: clipping, noise and accounting."""
