"""Data sets, partitions and batches."""

from fedlalr.data.load import load
from fedlalr.data.partition import Partition, partition
from fedlalr.data.population import DatasetClients, Population
from fedlalr.data.transforms import FlipCrop, Normalize, Transform

__all__ = ["DatasetClients", "FlipCrop", "Normalize", "Partition", "Population", "Transform", "load", "partition"]
