"""What the caller may have switched on around a run, and a run may not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Gradients on and autocast off, whichever of them, of inference mode and of autocast the caller is in.

    Inside another autocast torch would keep the casts of weights from one local step to the next, though the weights
    are others by then: so none are kept.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False, cache_enabled=False),
    ):
        yield
