"""Turns off dropout that a module calls as a function rather than as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class NoDropout(TorchFunctionMode):
    """Every function of the dropout family returns its input, and attention drops nothing.

    >>> import torch
    >>> with NoDropout():
    ...     F.dropout(torch.ones(3), 0.9)
    tensor([1., 1., 1.])
    """

    active: ClassVar[int] = 0
    """How many are in use. torch leaves modes out inside custom functions and in the backward pass; code that runs
    there asks for this."""

    def __enter__(self) -> Self:
        NoDropout.active += 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        NoDropout.active -= 1
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if "dropout" in getattr(func, "__name__", ""):
            return args[0] if args else options["input"]
        if func is F.scaled_dot_product_attention:
            args, options = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**options}
            if "dropout_p" in options:
                options["dropout_p"] = 0.0
        return func(*args, **options)
