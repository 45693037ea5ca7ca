"""An app whose clients fail on request."""
