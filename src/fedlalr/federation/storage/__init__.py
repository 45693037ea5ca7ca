"""The files of a run: journal, checkpoints, kept slots, fingerprint."""
