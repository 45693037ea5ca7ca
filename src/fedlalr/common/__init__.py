"""Small things every package uses: checks, suggestions, whole-file writes, colours. Imports nothing of ours."""
