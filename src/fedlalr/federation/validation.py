"""Rejects invalid input before any training starts, with messages that say what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.common.checks import check_instance
from fedlalr.common.named import nearest
from fedlalr.data.client_forms import as_pair
from fedlalr.data.population import Clients, Population, as_clients
from fedlalr.data.transforms import Transform
from fedlalr.data.trees import Tree, moved, named_leaves
from fedlalr.federation.evaluation import readable
from fedlalr.federation.loss_checks import check_loss, check_targets, kind
from fedlalr.federation.observers import Observer
from fedlalr.hf import causal_name, needs_labels, next_tokens
from fedlalr.training.accumulation import check_terms
from fedlalr.training.calling import (
    LABELS,
    MODEL_LOSS,
    arguments,
    for_loss,
    outputs_of,
    own_loss,
    prediction,
    target_of,
)
from fedlalr.training.interfaces import Training
from fedlalr.training.local_step import starting_slots
from fedlalr.training.stacked.masked_loss import ignored_label
from fedlalr.training.torch_state import get_buffers, in_mode, set_buffers


def check_model(model: object) -> None:
    """Reject anything but a module whose parameters are initialised and finite."""
    if not isinstance(model, nn.Module):
        given = type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, not {given}; the order is fl.run(model, clients, algorithm)")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"the model's {lazy[0]} has no shape before the first forward pass (a lazy module); pass a batch "
            f"through the model first, such as model(inputs[:2])"
        )
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise ValueError(
            f"the model's {empty[0]} is on the meta device, where tensors have no values; load the model's weights "
            f"first, or create them with model.to_empty(device='cpu') and initialise them"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise ValueError(f"the model's initial {name} has NaN or infinite numbers; initialise it")


def check_algorithm(algorithm: object) -> None:
    """Reject anything but an instance with an algorithm's functions."""
    check_instance("algorithm", algorithm)
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be one of fedlalr's, such as fl.FedLALR(), or a class with the same functions "
            f"(slots, init, start, step, finish, update and lr), not {algorithm!r}"
        )


def check_observers(observers: object) -> None:
    """Reject anything but a sequence of observers."""
    if not isinstance(observers, Sequence):
        raise TypeError(f"observers must be a list, such as [{type(observers).__name__}(…)], not {observers!r}")
    for observer in observers:
        check_instance("one of observers", observer)
        if not isinstance(observer, Observer):
            raise TypeError(f"an observer must be an instance of a subclass of fl.Observer, not {observer!r}")


def check_cohort(clients_per_round: int | None, population: int, min_clients: int) -> int:
    """The number of clients in a round."""
    if clients_per_round is None:
        clients_per_round = population
    if clients_per_round > population:
        raise ValueError(
            f"clients_per_round is {clients_per_round} but there are only {population} clients; "
            f"use at most {population}, or None for all"
        )
    if min_clients > clients_per_round:
        raise ValueError(
            f"min_clients is {min_clients} but only {clients_per_round} clients take part in a round; "
            f"use at most {clients_per_round}"
        )
    return clients_per_round


def check_slots(algorithm: Algorithm, slots: Slots, parameters: Tensor) -> None:
    """Reject a server's initial state that lacks a slot to broadcast, or has a slot that is not shaped like the model.

    The latter could be trained, but neither sent nor shown under the names of the parameters.
    """
    name, sent, wanted = type(algorithm).__name__, algorithm.slots.down, algorithm.slots.gradients
    if missing := ", ".join(slot for slot in sent if slot not in slots):
        raise ValueError(f"{name}'s slot table broadcasts {', '.join(sent)}, but its init returns no {missing}")
    local = starting_slots(algorithm, slots) if wanted else {}
    for slot in (*wanted, *wanted.values()):
        if slot not in local:
            asked = f"requests the gradients {dict(wanted)}"
            raise ValueError(f"{name}'s slot table {asked}, but its start returns no {slot!r}")
    for slot, tensor in slots.items():
        if tensor.shape != parameters.shape:
            raise ValueError(
                f"slot {slot!r} of {name}.init is {tuple(tensor.shape)}, but every slot must have one number for each "
                f"of the {len(parameters)} parameters, such as torch.full_like(params, 1.0)"
            )


def check_data(
    training: Training,
    clients: Clients,
    whose: str,
    owner: str = "client {}",
    transform: Transform | None = None,
    measured: bool = False,
) -> None:
    """Try module and loss on samples of the first client without training, and check all labels that are in one pool.

    `whose` and `owner` name the samples in messages: "client 0's", and "client {}" with the client's number. `measured`
    says whether the caller's metrics will get outputs and targets.
    """
    inputs, outputs, targets = _tried(training, clients, whose, transform)
    if measured:
        for part in (prediction(outputs), targets):
            readable(part)
    if clients is training.clients and isinstance(inputs, dict):
        _warn_of_misspelt(training.model, inputs)
    if training.accumulate > 1 and clients is training.clients:
        check_terms(training.loss, targets)
    if training.loss == MODEL_LOSS:
        own_loss(outputs)
        return
    outputs = for_loss(outputs, training.loss)
    ignored = ignored_label(training.loss)
    if ignored is not None and isinstance(outputs, Tensor):
        check_targets(outputs, targets, clients, ignored, whose, owner)
        if clients is training.clients:
            _warn_of_own_tokens(training.model, inputs, targets, ignored)
    check_loss(training, outputs, targets, whose)


def check_target(target: object, clients: object, test: object) -> None:
    """Reject the key of a target if no samples are dicts, in which it would be looked up."""
    if target is None or not isinstance(clients, Sequence):
        return
    given = clients if test is None else [*clients, test]
    if all(not isinstance(data, Mapping) and as_pair(data, "", None) is not None for data in given):
        raise ValueError(
            f"target={target!r} names a key of samples that are dicts, but the clients are pairs of tensors, whose "
            f"second part is the target; leave target out, or pass dicts"
        )


def check_arguments(model: nn.Module, inputs: Tree, targets: Tree | None, whose: str) -> None:
    """Reject a dict with a key that the module's forward does not take."""
    named = arguments(inputs, targets)[1]
    if not named:
        return
    takes = inspect.signature(model.forward).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in takes):
        return
    names = [each.name for each in takes if each.kind is not each.VAR_POSITIONAL]
    for name in named:
        if name not in names:
            what = "inputs have" if isinstance(inputs, dict) and name in inputs else "targets are passed under"
            raise ValueError(
                f"{whose} {what} the key {name!r}, which the model does not take; {type(model).__name__}.forward takes "
                f"{', '.join(names)}. Leave the key out of the samples, or rename it"
            )


def _unnamed(model: nn.Module, inputs: Mapping[str, object]) -> list[str]:
    """The inputs that a module's forward takes only because it takes any name, as those of Hugging Face do."""
    takes = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in takes.values()):  # it passes on whatever it gets
        return []
    return [name for name in inputs if name not in takes]


def _warn_of_misspelt(model: nn.Module, inputs: Mapping[str, object]) -> None:
    """Warn of an input that a module's forward does not name, if an absent argument differs by about one letter."""
    absent = [name for name in inspect.signature(model.forward).parameters if name not in inputs and name != LABELS]
    for name in _unnamed(model, inputs):
        if meant := nearest(name, absent, cutoff=0.94):
            warnings.warn(
                f"the samples have the key {name!r}, which {type(model).__name__}.forward does not name, so it may be "
                f"ignored; if you mean {meant!r}, rename it",
                stacklevel=5,  # at the call of `fl.run`
            )


def as_client_tests(given: object, training: Training, transform: Transform | None) -> Clients:
    """The caller's test sets, one for each client, on the device of the run."""
    try:
        target = target_of(training.model, training.loss, training.target)
        tests = as_clients(given, target, training.collate_fn)
    except (ValueError, TypeError) as error:
        raise type(error)(f"client_tests: {error}") from error
    if len(tests) != len(training.clients):
        raise ValueError(
            f"client_tests has {len(tests)} test sets, but there are {len(training.clients)} clients; give one for each"
        )
    if isinstance(tests, Population) and tests is not given:
        tests.transform = transform  # samples of the same kind as the clients'
    return tests.to(training.device)


def _tried(training: Training, clients: Clients, whose: str, transform: Transform | None) -> tuple[Tree, Any, Tree]:
    """Some samples of the first client, the module's outputs for them in evaluation mode, and their targets."""
    some = torch.arange(min(2, int(clients.sizes[0])), device="cpu")
    inputs, targets = (moved(part, training.device) for part in clients.batch(0, some))
    if transform is not None:
        inputs = transform.test(inputs)
    check_arguments(training.model, inputs, targets if training.loss == MODEL_LOSS else None, whose)
    if training.loss != MODEL_LOSS and needs_labels(training.model, inputs):
        raise ValueError(
            f"the model makes the inputs of its decoder from the labels, as T5 does, but {whose} inputs have no "
            f"decoder_input_ids; use loss='model', with which it gets the labels"
        )
    buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    try:
        with (
            torch.no_grad(),
            in_mode(training.model, training=False),
            torch.autocast(training.device.type, training.compute, enabled=training.compute is not None),
        ):
            return inputs, outputs_of(training.model, training.loss, inputs, targets), targets
    except Exception as error:
        mine = training.layout.dtype
        floats = {name: leaf for name, leaf in named_leaves(inputs).items() if leaf.is_floating_point()}
        wrong = [f"inputs{name}.to({mine})" for name, leaf in floats.items() if leaf.dtype != mine]
        hint = ""
        if wrong:
            hint = f"; the model is {mine}, so use {', '.join(wrong)}"
        elif isinstance(inputs, Tensor) and inputs.dtype != mine:
            hint = f"; the model is {mine}, so if they are values, not indices, use inputs.to({mine})"
        elif isinstance(inputs, dict) and (unnamed := _unnamed(training.model, inputs)):
            hint = f"; {type(training.model).__name__}.forward has no argument {', '.join(unnamed)}: rename the key"
        raise ValueError(
            f"the model cannot run on {whose} inputs, {kind(inputs)}: {type(error).__name__}: {error}{hint}"
        ) from error
    finally:
        # a module may count or store its inputs; buffers that its first forward pass creates are kept
        set_buffers(training.model, get_buffers(training.model) | buffers)


def _warn_of_own_tokens(model: nn.Module, inputs: Tree, targets: Tree, ignored: int) -> None:
    """Warn of a causal language model, alone or in another module, whose labels are the tokens that it reads."""
    if not isinstance(targets, Tensor) or (name := causal_name(model)) is None:
        return
    counted = targets != ignored
    for tokens in named_leaves(inputs).values():
        if tokens.shape == targets.shape and torch.equal(tokens[counted], targets[counted]):
            if torch.equal(next_tokens(tokens)[counted], targets[counted]):  # one word, repeated
                return
            warnings.warn(
                f"{name} predicts the next token, but the labels are the tokens that it reads, so it learns to repeat "
                f"them. They are shifted only in samples that are dicts, for a Hugging Face model that is passed as it "
                f"is; here, use fl.hf.next_tokens(labels), or loss='model' if the module passes the labels on",
                stacklevel=5,  # at the call of `fl.run`
            )
