"""Local steps of a cohort on one GPU, as a stack and one client after another, and how they are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlalr.algorithms import Algorithm, Context, FedLALR, Slots
from fedlalr.training.clipping import Regularisation
from fedlalr.training.fused_steps import fused_step
from fedlalr.training.layout import Layout
from fedlalr.training.stacked.forms import stacked_form

WEIGHT_DECAY = 1e-3


class StackedSteps:
    """Every client's local step at once: forward, backward and update through the kernels, as a CUDA graph."""

    def __init__(self, model: nn.Module, algorithm: Algorithm, inputs: Tensor, targets: Tensor) -> None:
        device, clients = inputs.device, len(inputs)
        self.inputs, self.targets, self.layout = inputs, targets, Layout.of(model)
        form = stacked_form(model, torch.bfloat16, inputs.shape[2:])
        step = fused_step(algorithm, device, torch.float32)
        if form is None or step is None:
            raise SystemExit("the kernels need a CUDA GPU with Triton; `fedlalr doctor` says what this machine has")
        self.form, self.update = form, step
        start = algorithm.start(algorithm.init(self.layout.flatten(dict(model.named_parameters()))), Slots())
        self.state = start.map(lambda slot: slot.expand(clients, -1).clone())
        self.buffers = {name: buffer.expand(clients, *buffer.shape).clone() for name, buffer in model.named_buffers()}
        self.context = Context(round=1, lr=torch.tensor(1e-3, device=device), steps=1, step=1)
        self.losses = torch.zeros(clients, device=device)
        self._graph = self._capture()

    def __call__(self) -> None:
        self._graph.replay()

    def step(self) -> None:
        """One local step of every client."""
        x = self.state.x.detach().requires_grad_()
        logits, after = self.form(self.layout.views(x), self.buffers, self.inputs)
        each = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten(), reduction="none")
        losses = each.view(self.targets.shape).mean(dim=1)
        (gradient,) = torch.autograd.grad(losses.sum(), x)
        with torch.no_grad():
            self.update(self.state, gradient, Slots(), self.context, Regularisation(weight_decay=WEIGHT_DECAY))
            self.losses.copy_(losses)
            for name, buffer in self.buffers.items():
                buffer.copy_(after[name])

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


class LoopedSteps:
    """The same steps one client after another: torch's own layers and its fused AMSGrad or SGD."""

    def __init__(
        self, make: Callable[[], nn.Module], algorithm: Algorithm, inputs: Tensor, targets: Tensor, tf32: bool
    ) -> None:
        self.inputs, self.targets, self.tf32 = inputs, targets, tf32
        self.models = [make().to(inputs.device) for _ in inputs]
        self.optimisers = [self._optimiser(model, algorithm) for model in self.models]

    def __call__(self) -> None:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32
        for model, optimiser, inputs, targets in zip(
            self.models, self.optimisers, self.inputs, self.targets, strict=True
        ):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
        torch.set_float32_matmul_precision(precision)

    @staticmethod
    def _optimiser(model: nn.Module, algorithm: Algorithm) -> torch.optim.Optimizer:
        if isinstance(algorithm, FedLALR):
            return torch.optim.Adam(
                model.parameters(), 1e-3, algorithm.betas, weight_decay=WEIGHT_DECAY, amsgrad=True, fused=True
            )
        return torch.optim.SGD(model.parameters(), 1e-3, weight_decay=WEIGHT_DECAY, fused=True)


def time_interleaved(jobs: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each job over several rounds in which every job runs once, after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(-2, repeats):
        for name, job in jobs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            job()
            end.record()
            end.synchronize()
            if number >= 0:
                times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


def report(times: Mapping[str, float], samples: int, base: str) -> None:
    """Print milliseconds a step, samples a second and how many times faster than `base`."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {samples} samples a step, medians, interleaved")
    width = max(map(len, times))
    for name, milliseconds in times.items():
        rate = samples / milliseconds * 1e3
        print(f"{name:{width}} {milliseconds:9.2f} ms {rate:11,.0f} samples/s {times[base] / milliseconds:7.1f} ×")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def show_profile(job: Callable[[], None], rows: int = 16) -> None:
    """Print where the time of a job goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        job()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    print(f"  {sum(event.self_device_time_total for event in events) / 1e3:8.3f} ms in kernels")
    for event in events[:rows]:
        print(f"  {event.self_device_time_total / 1e3:8.3f} ms {event.count:4d} × {event.key[:80]}")
