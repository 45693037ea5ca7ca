"""The networks of the paper's experiments in sizes of ours, transformers, and small ones for laptops."""

from fedlalr.models.cnn import CNN, DenseCNN
from fedlalr.models.convmixer import ConvMixer
from fedlalr.models.linear import MLP, Logistic
from fedlalr.models.lstm import CharLSTM
from fedlalr.models.transformer import GPT, ViT

__all__ = ["CNN", "GPT", "MLP", "CharLSTM", "ConvMixer", "DenseCNN", "Logistic", "ViT"]
