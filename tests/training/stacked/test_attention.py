"""Attention over a stack gives every client what it would get alone."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from fedlalr.training.stacked.functions import batched_functions

CLIENTS, BATCH, HEADS, LENGTH, WIDTH = 3, 4, 2, 5, 6


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def boolean(*shape):
    return (torch.rand(*shape) < 0.7) | (torch.arange(LENGTH) == 0)  # every query sees something


MASKS = {
    "none": lambda: (None, {}),
    "causal": lambda: (None, {"is_causal": True}),
    "scaled": lambda: (None, {"scale": 0.1}),
    "padding": lambda: (boolean(CLIENTS, BATCH, 1, 1, LENGTH), {}),
    "of each head": lambda: (boolean(CLIENTS, BATCH, HEADS, LENGTH, LENGTH), {}),
    "of a client": lambda: (boolean(CLIENTS, LENGTH, LENGTH), {}),
    "trained bias": lambda: (numbers(CLIENTS, 1, HEADS, LENGTH, LENGTH), {}),
}


@pytest.mark.parametrize("form", MASKS)
def test_every_client_gets_what_it_would_get_alone(form):
    mask, options = MASKS[form]()
    tensors = [numbers(CLIENTS, BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)] + ([] if mask is None else [mask])
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    with batched_functions(fast=False):
        together = vmap(lambda *one: F.scaled_dot_product_attention(*one, **options))(*tensors)
    alone = torch.stack(
        [F.scaled_dot_product_attention(*(t[client] for t in tensors), **options) for client in range(CLIENTS)]
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)
    weights = torch.randn_like(alone)
    for mine, right in zip(
        torch.autograd.grad((together * weights).sum(), leaves),
        torch.autograd.grad((alone * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-13)


def test_a_mask_and_keys_may_be_the_same_for_all_clients():
    query, key = numbers(CLIENTS, BATCH, HEADS, LENGTH, WIDTH), numbers(BATCH, HEADS, LENGTH, WIDTH)
    mask = boolean(LENGTH, LENGTH)
    with batched_functions(fast=False):
        together = vmap(lambda one: F.scaled_dot_product_attention(one, key, key, attn_mask=mask))(query)
    alone = torch.stack([F.scaled_dot_product_attention(one, key, key, attn_mask=mask) for one in query])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)


def test_queries_without_a_batch_are_folded_too():
    query, mask = numbers(CLIENTS, LENGTH, WIDTH), boolean(CLIENTS, LENGTH, LENGTH)
    with batched_functions(fast=False):
        together = vmap(lambda one, seen: F.scaled_dot_product_attention(one, one, one, seen))(query, mask)
    alone = torch.stack(
        [F.scaled_dot_product_attention(*(one,) * 3, seen) for one, seen in zip(query, mask, strict=True)]
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-14)


def test_dropout_of_attention_differs_between_clients():
    query = torch.ones(CLIENTS, BATCH, HEADS, LENGTH, WIDTH)
    with batched_functions(fast=False):
        dropped = vmap(
            lambda one: F.scaled_dot_product_attention(one, one, one, dropout_p=0.5), randomness="different"
        )(query)
    assert not torch.equal(dropped[0], dropped[1])
