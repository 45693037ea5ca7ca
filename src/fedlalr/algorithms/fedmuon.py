"""FedMuon: local steps along orthogonalised momentum, which is averaged, and aligned with the server's last change.

    server:  M = 0, d = 0                                                      # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  M_i = M                                                  # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                M_i = β M_i + g
                O = U Vᵀ  for  M_i = U Σ Vᵀ, approximately, by Newton-Schulz
                x_i = x_i − (1 − α) η_t O + (α / K_i) d
            send x_i, M_i                                                      # finish
        d = mean x_i − x                                                       # update
        x = mean x_i,  M = mean M_i  over S

This is for matrices; a parameter with more dimensions, such as a convolution, is a matrix of its first dimension by all
others. Biases, norms and other vectors take a step of Adam instead, restarted in every round, with the rate ρ η_t and
the same alignment. `align` is α, `vector_rate` is ρ, `betas` are Adam's.

Five Newton-Schulz steps with Muon's coefficients bring every singular value of M above 0.002 ‖M‖ to between 0.68 and
1.21, and smaller ones nearer to 1.

The authors' public code differs from the paper: its momentum is Nesterov's with β = 0.98, it multiplies O by
√max(1, rows / columns), and the Newton-Schulz steps run in bfloat16; here they run in the precision of the parameters.

Liu, Shang, Zhou, Liu, Liu, Liu. "FedMuon: Accelerating Federated Learning with Matrix Orthogonalization".
arXiv 2510.27403. The orthogonalisation is that of Jordan et al., "Muon: An optimizer for hidden layers", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedlalr.algorithms.server_optimizers import gathered
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Fraction, Positive

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Muon's polynomial, which raises small singular values as fast as possible."""
STEPS = 5


@dataclass(frozen=True)
class FedMuon(Checked):
    """Local Muon for matrices and Adam for vectors, with averaged momentum and alignment."""

    lr: Positive = 0.02
    beta: Fraction = 0.95
    align: Fraction = 0.5
    vector_rate: Positive = 0.1
    betas: Betas = (0.9, 0.95)
    eps: Positive = 1e-10

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x", "m", "d") if self.align else ("x", "m"), up={"x": "mean", "m": "mean"}, shapes=True)

    def init(self, params: Tensor) -> Slots:
        zero = torch.zeros_like(params)
        return Slots(x=params, m=zero, d=zero).only(*self.slots.down)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, m=broadcast.m, v=torch.zeros_like(broadcast.x))

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        parts = zip(context.shapes, *(split(slot, context) for slot in (client.m, client.v, gradient)), strict=True)
        new = [
            self._matrix_step(m, v, g, shape) if len(shape) > 1 else self._vector_step(m, v, g, context)
            for shape, m, v, g in parts
        ]
        along, m, v = (torch.cat(each, dim=-1) for each in zip(*new, strict=True))
        x = client.x - (1 - self.align) * context.lr * along
        if self.align:
            x = x + self.align / context.steps * broadcast.d
        return Slots(x=x, m=m, v=v)

    def _matrix_step(self, m: Tensor, v: Tensor, gradient: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        m = self.beta * m + gradient
        return orthogonalised(m.reshape(*m.shape[:-1], shape[0], -1)).flatten(-2), m, v

    def _vector_step(self, m: Tensor, v: Tensor, gradient: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        beta1, beta2 = self.betas
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        root = (v / gathered(beta2, context.step)).sqrt()
        return self.vector_rate * m / gathered(beta1, context.step) / (root + self.eps), m, v

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        parts = zip(context.shapes, split(client.m, context), strict=True)
        m = [m if len(shape) > 1 else torch.zeros_like(m) for shape, m in parts]  # Adam restarts in every round
        return Slots(x=client.x, m=torch.cat(m, dim=-1)), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced.replace(d=reduced.x - server.x) if self.align else reduced


def split(vector: Tensor, context: Context) -> tuple[Tensor, ...]:
    """The parameters in a vector `[…, P]`, each flat."""
    return torch.split(vector, [prod(shape) for shape in context.shapes], dim=-1)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices `[…, R, C]` with all singular values brought near 1; zero stays zero."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices  # the products are smaller
    norm: Tensor = torch.linalg.matrix_norm(found, keepdim=True)
    found = found / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    for _ in range(STEPS):
        square = found @ found.mT
        found = a * found + (b * square + c * square @ square) @ found
    return found.mT if tall else found
