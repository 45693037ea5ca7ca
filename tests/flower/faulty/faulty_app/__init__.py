"""An app whose client 1 misbehaves when told to."""
