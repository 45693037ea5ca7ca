"""What fedlalr knows about Hugging Face models. They need no wrapper: pass one to `fl.run` as it is.

Nothing here imports transformers: whoever has such a model has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_causal", "next_tokens"]

IGNORED = -100
"""The label that torch's and Hugging Face's losses ignore."""
_SHIFTING = (
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "CTRLLMHeadModel",
    "GPT2LMHeadModel",
    "OpenAIGPTLMHeadModel",
    "ReformerModelWithLMHead",
)
"""Causal language models whose names do not end in ForCausalLM."""
_GENERATING = ("ForConditionalGeneration", "ForTextToText", "ForSpeechToText", "MTModel", "EncoderDecoderModel")
"""How the names of models end whose decoder generates a text."""


def is_causal(model: nn.Module) -> bool:
    """Whether a model is one of Hugging Face's causal language models, also with adapters of PEFT or compiled.

    Such a model predicts at each position the token after it, while the labels of its data are the tokens themselves.
    In samples that are dicts, `fl.run` therefore moves the labels by one place, as the models' own losses do.
    """
    kinds, has_encoder = _kinds(model)
    if any(kind.endswith("ForCausalLM") or kind in _SHIFTING for kind in kinds):
        return True
    return not has_encoder and any(kind.endswith("ForConditionalGeneration") for kind in kinds)


def causal_name(model: nn.Module) -> str | None:
    """The name of the causal language model that a module is or contains."""
    return next((type(module).__name__ for module in model.modules() if is_causal(module)), None)


def passes_on(model: nn.Module, outputs: object) -> bool:
    """Whether a module's outputs are those of a causal language model in it."""
    return "CausalLM" in type(outputs).__name__ and causal_name(model) is not None


def needs_labels(model: nn.Module, inputs: Any) -> bool:
    """Whether a model makes the inputs of its decoder from the labels, as T5 does, and they are not given.

    BART runs without either, but then its decoder reads the text that the encoder reads.
    """
    kinds, has_encoder = _kinds(model)
    named = inputs if isinstance(inputs, dict) else ()
    given = isinstance(inputs, tuple) or any(name.startswith("decoder_input") for name in named)
    return has_encoder and not given and any(kind.endswith(_GENERATING) for kind in kinds)


def _kinds(model: nn.Module) -> tuple[list[str], bool]:
    """The names of the classes of a Hugging Face model without its adapters, and whether it has an encoder and a
    decoder; no names for other modules."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not hasattr(base, "loss_type"):
        return [], False
    return [kind.__name__ for kind in type(base).__mro__], bool(getattr(base.config, "is_encoder_decoder", False))


def next_tokens(labels: Any, ignored: int = IGNORED) -> Tensor:
    """Labels moved one place to the left, so that each is the token to predict; the last one is ignored.

    For `(inputs, targets)` pairs and for causal language models of your own.

    >>> next_tokens([5, 6, 7])
    tensor([   6,    7, -100])
    """
    tokens = torch.as_tensor(labels)
    if not tokens.dim():
        raise ValueError("a causal language model has a label for each token, but here a sample has a single label")
    return torch.cat([tokens[..., 1:], torch.full_like(tokens[..., :1], ignored)], dim=-1)


def after_prompt(labels: Tensor, positions: int) -> Tensor:
    """Labels at the last of a model's positions. The others are virtual tokens, which P-tuning and prompt tuning put
    before a text, and which have no label.

    >>> after_prompt(torch.tensor([[5, 6]]), positions=3)
    tensor([[-100,    5,    6]])
    """
    prompt = labels.new_full((len(labels), max(positions - labels.shape[1], 0)), IGNORED)
    return torch.cat([prompt, labels], dim=1)


def are_next_tokens(labels: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether each label is the token after the one that a model reads there. Of the last one this cannot be known.

    >>> are_next_tokens(torch.tensor([[6, 7]]), {"input_ids": torch.tensor([[5, 6]])})
    True
    """
    counted = labels[..., :-1] >= 0  # those that losses ignore are negative
    return bool(counted.any()) and any(
        isinstance(tokens, Tensor)
        and tokens.shape == labels.shape
        and torch.equal(tokens[..., 1:][counted], labels[..., :-1][counted])
        for tokens in inputs.values()
    )


@contextmanager
def full_masks() -> Iterator[None]:
    """Make models build every attention mask in full.

    Otherwise they leave out a mask that hides nothing, and to know that they read its values, which vmap cannot.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    functions = {} if masking is None else masking.ALL_MASK_ATTENTION_FUNCTIONS
    names = [name for name in ("eager", "sdpa") if name in functions]
    for name in names:
        functions[name] = partial(_full_mask, functions[name])
    try:
        yield
    finally:
        for name in names:
            del functions[name]  # of this table's own entries; transformers' remain


def _full_mask(make: Callable[..., Any], *args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
    if attention_mask is not None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make(*args, attention_mask=attention_mask, **options)
