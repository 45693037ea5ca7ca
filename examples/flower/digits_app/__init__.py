"""FedLALR on handwritten digits, partitioned over the nodes."""
