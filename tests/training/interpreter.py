"""Where tests of the Triton kernels run: on a GPU or, with `TRITON_INTERPRET=1`, on the CPU by Triton's interpreter."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="module", autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Triton's interpreter holds bfloat16 as bits and multiplies those: give its product the numbers instead.

    Half of its time goes into three other things, each of which has a short form here.
    """
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

    def reduce_by_halves(self: Any, inputs: tuple[Any, ...]) -> Any:
        """Combine one half of the numbers with the other, again and again, rather than one number after the other."""
        parts = [each.handle.data for each in inputs]
        if self.axis != 0 or self.keep_dims or parts[0].ndim != 1:
            return one_by_one(self, inputs)
        while (half := len(parts[0]) // 2) > 0:
            pairs = [part[:half] for part in parts] + [part[half:] for part in parts]
            kinds = [each.dtype for each in inputs] * 2
            found = self.combine_fn.fn(*(self.to_tensor(*pair) for pair in zip(pairs, kinds, strict=True)))
            parts = [each.handle.data for each in (found if isinstance(found, tuple) else (found,))]
        return [self.to_tensor(part[0], each.dtype) for part, each in zip(parts, inputs, strict=True)]

    @cache
    def members(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]

    def replace_members(place: Any, *rest: Any) -> None:
        """What must be replaced in a module is the same whenever a kernel calls a function."""
        for name in members(place):
            if tl.core.is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, *rest)

    def numpy_type(kind: Any) -> Any:
        """The interpreter lists all types whenever it looks for one."""
        if kind.name not in types:
            types[kind.name] = look_up(kind)
        return types[kind.name]

    types: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype
    builder, reductions = interpreter.InterpreterBuilder, interpreter.ReduceOps
    product, one_by_one = builder.create_dot, reductions.generic_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", lambda self, a, b, *rest: product(self, numbers(a), numbers(b), *rest))
        patch.setattr(reductions, "generic_reduce", reduce_by_halves)
        patch.setattr(interpreter, "_patch_builtin", replace_members)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type)
        yield
