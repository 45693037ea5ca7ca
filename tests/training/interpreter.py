"""Where tests of the Triton kernels run: on a GPU or, with `TRITON_INTERPRET=1`, on the CPU by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="module", autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Triton's interpreter holds bfloat16 as bits and multiplies those: give its product the numbers instead."""
    if not INTERPRETED:
        yield
        return
    from triton import language as tl
    from triton.runtime import interpreter

    def numbers(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    builder = interpreter.InterpreterBuilder
    product = builder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", lambda self, a, b, *rest: product(self, numbers(a), numbers(b), *rest))
        yield
