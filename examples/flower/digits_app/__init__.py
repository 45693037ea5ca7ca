"""FedLALR on handwritten digits, one part of them on every node."""
