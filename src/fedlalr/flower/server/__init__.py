"""The server side: the strategy, its nodes, and the replies of a round."""
