"""What a run writes and reads: journal, checkpoints, kept slots, fingerprint."""
