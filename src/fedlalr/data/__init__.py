"""Data sets, partitions and batches."""

from fedlalr.data.load import load
from fedlalr.data.partition import Partition, partition
from fedlalr.data.population import DatasetClients, Population

__all__ = ["DatasetClients", "Partition", "Population", "load", "partition"]
