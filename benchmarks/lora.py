"""LoRA fine-tuning of a GPT on Shakespeare: text, base model and adapters for `fedlalr compare`.

    python benchmarks/lora.py runs/lora-base.safetensors --device cuda       pretrain on every other role
    python benchmarks/wider_grid.py docs/results/lora-grid.yaml docs/results/lora device=cuda

The base model sees the text of every other role; clients are 100 of the remaining roles, with 50 windows to train on
and ten to test.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.data.sources import raw

CLIENTS, WINDOWS, TESTED = 100, 50, 10
Pair = tuple[Tensor, Tensor]


def roles() -> list[tuple[Pair, Pair]]:
    """The windows of every role, for training and for testing, with a target at each position."""
    text = raw("shakespeare", roles=None, train=None, test=None, sequence=True)
    found = []
    for role in range(len(text.group_names)):
        own, tested = (torch.nonzero(groups == role).flatten() for groups in (text.groups, text.test_groups))
        found.append(
            ((text.inputs[own], text.targets[own]), (text.test_inputs[tested], text.test_targets[tested])),
        )
    return found


def clients() -> tuple[list[Pair], Pair]:
    """Roles that the base model has not seen, and a test set of them all."""
    enough = [one for one in roles()[1::2] if len(one[0][0]) >= WINDOWS and len(one[1][0]) >= TESTED][:CLIENTS]
    assert len(enough) == CLIENTS
    train = [(inputs[:WINDOWS], targets[:WINDOWS]) for (inputs, targets), _ in enough]
    tests = [(inputs[:TESTED], targets[:TESTED]) for _, (inputs, targets) in enough]
    inputs, targets = (torch.cat(part) for part in zip(*tests, strict=True))
    return train, (inputs, targets)


class Adapted(nn.Module):
    """A frozen linear layer plus B·A: A is random, and B zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return changed


def adapted(base: str, rank: int = 8) -> nn.Module:
    """The pretrained GPT with adapters in every linear layer of its blocks."""
    model = fl.models.GPT.tiny(length=80)
    model.load_state_dict(load_file(base))
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.inputs = Adapted(block.attention.inputs, rank)
        block.attention.outputs = Adapted(block.attention.outputs, rank)
        block.mlp[0], block.mlp[2] = Adapted(block.mlp[0], rank), Adapted(block.mlp[2], rank)
    return model


def pretrain(path: Path, rounds: int, device: str) -> None:
    """Train on every other role as one client with Adam, and save the weights."""
    inputs, targets = (torch.cat(part) for part in zip(*(train for train, _ in roles()[::2]), strict=True))
    torch.manual_seed(0)
    result = fl.run(
        fl.models.GPT.tiny(length=80),
        [(inputs, targets)],
        fl.LocalAdam(lr=1e-3),
        rounds=rounds,
        local=fl.Steps(100),
        batch_size=64,
        schedule=fl.schedules.Cosine(),
        test=clients()[1],
        device=device,
        dtype="bfloat16" if device.startswith("cuda") else "float32",
    )
    weights = {name: value.float().cpu().clone() for name, value in result.model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)
    for record in result.history[:: max(1, rounds // 10)] + result.history[-1:]:
        print(record.round, f"train loss {record.train_loss:.3f}, accuracy on roles not seen {record.accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rounds", type=int, default=30, help="of 100 steps")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    pretrain(arguments.path, arguments.rounds, arguments.device)
