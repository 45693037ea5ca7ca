"""The server's end: the strategy, its nodes, and the replies of a round."""
