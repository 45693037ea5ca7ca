"""The paper's CIFAR-10 job on one GPU: local steps of a cohort of ConvMixers on random images.

python benchmarks/gpu_convmixer.py --clients 50 --batch 50 --profile
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

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
    parser.add_argument("--unfused", action="store_true", help="compare the backward pass by one kernel and by two")
    options = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(options.clients, options.batch, 3, 32, 32, device="cuda")
    targets = torch.randint(10, (options.clients, options.batch), device="cuda")
    model, fedlalr, fedavg = ConvMixer().cuda(), FedLALR(), FedAvg(lr=1e-3)
    if options.unfused:
        compare_backward(model, fedlalr, inputs, targets, options.repeats)
        return
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


def compare_backward(model: ConvMixer, fedlalr: FedLALR, inputs: Tensor, targets: Tensor, repeats: int) -> None:
    """Time the depthwise layers' backward pass by one kernel and by two; the gradients must agree to bfloat16."""
    from fedlalr.training.kernels import maps

    jobs, gradients = {}, []
    for name, maps.FUSED_BACKWARD in (("two kernels", False), ("one kernel", True)):
        jobs[name] = job = StackedSteps(model, fedlalr, inputs, targets)
        x = job.layout.flatten(dict(model.named_parameters())).detach().expand(len(inputs), -1).clone().requires_grad_()
        buffers = {name: buffer.expand(len(inputs), *buffer.shape) for name, buffer in model.named_buffers()}
        logits, _ = job.form(job.layout.views(x), buffers, inputs)
        gradients += torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), x)
    distance = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    print(f"the gradients differ by {distance:.1e} of their norm")
    assert distance < 2**-8
    report(time_interleaved(jobs, repeats), targets.numel(), base="two kernels")
    show_profile(jobs["one kernel"])


if __name__ == "__main__":
    main()
