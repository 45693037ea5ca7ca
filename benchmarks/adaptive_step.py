"""What FedLALR's local step costs on a CPU beside FedAvg's whole round: `python benchmarks/adaptive_step.py`.

One process, one thread, the two jobs that are small chains of linear layers. Prints nanoseconds for each parameter of
each client in each local step: of FedAvg's round, of FedLALR's, of the AMSGrad step alone in the forms that torch
offers, and of nothing but its root and its division. With a step, no ratio of the rounds is below 1 + step / FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.benchmark import JOBS
from fedlalr.benchmark.jobs import BenchmarkJob
from fedlalr.training.torch_internals import amsgrad_
from profile_job import prepare

LR, BETAS = 1e-6, (0.9, 0.995)
Step = Callable[[Slots, Tensor], None]


def root_and_division(client: Slots, root: Tensor) -> None:
    """The two operations that no form of the step can leave out."""
    torch.sqrt(client.v_hat, out=root)
    client.x.addcdiv_(client.m, root, value=-LR)


def steps(job: BenchmarkJob, parameters: int) -> dict[str, Callable[[], None]]:
    """All AMSGrad steps of a round: of the cohort together, or of one client after another, each within the cache."""
    x, m, gradient = (torch.randn(job.cohort, parameters) for _ in range(3))
    v = torch.rand(job.cohort, parameters) + 0.1
    together = Slots(x=x, m=m, v=v, v_hat=v.clone())
    alone = [together.map(lambda slot, row=row: slot[row]) for row in range(job.cohort)]

    def all_steps(step: Step, stacks: Sequence[Slots], gradient: Tensor) -> Callable[[], None]:
        def run() -> None:
            for stack in stacks:
                for _ in range(job.steps):
                    step(stack, gradient)

        return run

    def fused(client: Slots, gradient: Tensor) -> None:
        amsgrad_(client, gradient, LR, BETAS)

    def passes(client: Slots, gradient: Tensor) -> None:
        client.m.lerp_(gradient, 1 - BETAS[0])
        client.v.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        torch.maximum(client.v_hat, client.v, out=client.v_hat)
        root = torch.sqrt(client.v_hat, out=gradient)
        client.x.sub_(torch.div(client.m, root, out=root).mul_(LR))

    return {
        "AMSGrad, torch's fused Adam, all clients": all_steps(fused, [together], gradient),
        "AMSGrad, torch's fused Adam, client by client": all_steps(fused, alone, gradient[0]),
        "AMSGrad, single operators, all clients": all_steps(passes, [together], gradient.clone()),
        "AMSGrad, single operators, client by client": all_steps(passes, alone, gradient[0].clone()),
        "its root and division, all clients": all_steps(root_and_division, [together], gradient.clone()),
        "its root and division, client by client": all_steps(root_and_division, alone, gradient[0].clone()),
    }


def take_turns(contestants: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Median seconds of each; the first two turns do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(times + 2):
        for name, turn in contestants.items():
            began = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(mine[2:]) for name, mine in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the AMSGrad step beside whole rounds.")
    parser.add_argument("--times", type=int, default=31, help="turns of each contestant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("logistic", "perceptron"):
        job = JOBS[name]
        parameters = sum(parameter.numel() for parameter in job.model().parameters())
        rounds = {f"round, {method}": prepare(name, method) for method in ("fedavg", "fedlalr")}
        seconds = take_turns({**rounds, **steps(job, parameters)}, options.times)
        print(f"{name}: {parameters} parameters, {job.cohort} clients, {job.steps} steps")
        for what, spent in seconds.items():
            print(f"  {1e9 * spent / (job.cohort * parameters * job.steps):5.2f} ns  {what}")


if __name__ == "__main__":
    main()
