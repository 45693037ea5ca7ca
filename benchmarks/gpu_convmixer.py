"""The paper's CIFAR-10 job on one GPU: local steps of a cohort of ConvMixers on random images.

python benchmarks/gpu_convmixer.py --clients 50 --batch 50 --profile
"""

from __future__ import annotations

import argparse

import torch

from fedlalr.algorithms import FedAvg, FedLALR
from fedlalr.models import ConvMixer
from gpu_steps import LoopedSteps, StackedSteps, report, show_profile, time_interleaved


def main() -> None:
    """Time the stack under FedLALR and FedAvg beside one client after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="show where the time of a stacked step goes")
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(options.clients, options.batch, 3, 32, 32, device="cuda")
    targets = torch.randint(10, (options.clients, options.batch), device="cuda")
    model, fedlalr, fedavg = ConvMixer().cuda(), FedLALR(), FedAvg(lr=1e-3)
    stacked = StackedSteps(model, fedlalr, inputs, targets)
    times = time_interleaved(
        {
            "one after another, float32": LoopedSteps(ConvMixer, fedlalr, inputs, targets, tf32=False),
            "one after another, TF32": LoopedSteps(ConvMixer, fedlalr, inputs, targets, tf32=True),
            "stacked, FedLALR": stacked,
            "stacked, FedAvg": StackedSteps(model, fedavg, inputs, targets),
        },
        options.repeats,
    )
    report(times, targets.numel(), base="one after another, TF32")
    print(f"FedLALR takes {times['stacked, FedLALR'] / times['stacked, FedAvg']:.3f} × FedAvg's time")
    if options.profile:
        show_profile(stacked)


if __name__ == "__main__":
    main()
