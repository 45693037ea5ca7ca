"""A small transformer on dicts of token ids and masks, and clients of unequal size for it."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from conftest import set_seed

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class TinyTransformer(nn.Module):
    """One attention layer with a 2-D mask. Logits `[B, T, V]`, in an object as Hugging Face models return them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.embed(input_ids)
        q, k, v = self.mix(x).chunk(3, dim=-1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(attention_mask[:, None, :] == 0, float("-inf"))
        logits = self.head(self.norm(x + scores.softmax(-1) @ v))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def token_loss(logits, labels):
    """The mean over the tokens of a batch that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_model():
    set_seed(3)
    return TinyTransformer().double()


def token_samples(count, seed, length=LENGTH):
    """A dict of tensors: ids, a mask with at least one token, and labels, −100 where the mask is 0 and elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (count, length), generator=draw)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (count, 1), generator=draw)).long()
    labels = torch.where(torch.rand(count, length, generator=draw) < 0.3, -100, (ids * 3 + 1) % VOCABULARY)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels.where(mask == 1, -100)}


def token_clients(sizes=(7, 3, 5, 9)):
    return [token_samples(size, seed) for seed, size in enumerate(sizes)]


class Rows(Dataset):
    """The rows of a dict of tensors as a data set of dicts; `ragged`: without the padding at their end."""

    def __init__(self, samples, ragged=False):
        self.samples, self.ragged = samples, ragged

    def __len__(self):
        return len(self.samples["input_ids"])

    def __getitem__(self, i):
        row = {name: values[i] for name, values in self.samples.items()}
        count = int(row["attention_mask"].sum())
        return {name: value[:count] for name, value in row.items()} if self.ragged else row


def pad_tokens(samples):
    """A `collate_fn`: pads to the longest sample of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.stack([F.pad(sample[name], (0, longest - len(sample[name])), value=value) for sample in samples])
        for name, value in fill.items()
    }
