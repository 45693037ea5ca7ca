"""The client side: the client app, local training, and the state kept on the node."""
