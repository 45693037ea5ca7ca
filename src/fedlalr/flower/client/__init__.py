"""A node's end: the client app, its local round, and what it keeps."""
