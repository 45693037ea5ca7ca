"""Evaluates the server's model on the test set, also by the caller's metrics, and every client's on its own samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsFloat, cast

import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Slots
from fedlalr.common.checks import check_takes
from fedlalr.data.population import Clients
from fedlalr.data.random import MODULES, key
from fedlalr.data.test_set import as_test, is_one_tensor
from fedlalr.data.transforms import Transform
from fedlalr.data.trees import leaves, moved, named_leaves
from fedlalr.federation.record import Distribution
from fedlalr.federation.round import ServerState
from fedlalr.hf import after_prompt, are_next_tokens, is_causal, next_tokens, passes_on
from fedlalr.training.calling import MODEL_LOSS, classes_first, outputs_and_loss, prediction
from fedlalr.training.channels_last import in_channels_last
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.memory import is_out_of_memory
from fedlalr.training.options import Loss
from fedlalr.training.personal import first_kept, load_client, shared_buffers, shared_slots
from fedlalr.training.ranks import ALONE, Ranks
from fedlalr.training.stacked.forms import inference_form
from fedlalr.training.stacked.masked_loss import IGNORED_LABEL, has_tokens, ignored_label
from fedlalr.training.torch_state import forked_generators, in_mode, seed_generators

Metric = Callable[[Tensor, Tensor], SupportsFloat]
"""A function from all outputs and all targets, on the CPU and at least in float32, to one number."""
Metrics = Mapping[str, Metric]


class Evaluation(NamedTuple):
    """Mean loss, accuracy for class targets, and the caller's metrics."""

    loss: float
    accuracy: float | None
    metrics: Mapping[str, float]


SAMPLES_AT_ONCE = 100
"""Batch size on a CPU, whose caches should hold the activations."""
NUMBERS_AT_ONCE = 1 << 24
"""Numbers in a batch of inputs on a GPU, which small batches would leave idle."""
_LOSSES, _CORRECT, _COUNTED, _CLASSED, _DIVISOR = range(5)
"""The places in a tally: the sum of the losses, the correct predictions, how many targets count, whether they are
classes, and the divisor of the losses: the number of targets, or the weights of their classes."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    test: object,
    loss: Loss | Literal["model"],
    *,
    transform: Transform | None = None,
    batch_size: int | None = None,
    compute: torch.dtype | None = None,
    ranks: Ranks = ALONE,
    metrics: Metrics | None = None,
) -> Evaluation:
    """Run a module over a test set in evaluation mode, on the device of its parameters; each rank over its share.

    A batch that does not fit into memory is split until it does. With metrics, every rank sees the whole set. `test` is
    anything that `as_test` accepts.
    """
    ranks = ALONE if metrics else ranks
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    held_out = as_test(test)
    device = next(model.parameters()).device
    ignored, weights = ignored_label(loss), _class_weights(loss)
    padding = IGNORED_LABEL if ignored is None else ignored
    shifts = ignored is None and is_causal(model)  # the loss moves the labels by itself
    forward: Callable[..., Any] | None = None

    def measure(index: Tensor) -> Tensor:
        """The tally of some samples."""
        nonlocal forward
        batch, wanted = (moved(part, device) for part in held_out.batch(0, index))
        batch = transform.test(batch) if transform is not None else batch
        if forward is None:
            fast = inference_form(model, compute, batch.shape[1:]) if isinstance(batch, Tensor) else None
            forward = fast or in_channels_last(model, batch) or model
        with torch.autocast(device.type, compute, enabled=compute is not None):
            outputs, mean = outputs_and_loss(forward, loss, batch, wanted)
        scores = classes_first(outputs)
        if isinstance(wanted, Tensor) and has_tokens(wanted):
            own = loss == MODEL_LOSS and (shifts or passes_on(model, outputs))
            if own or (shifts and isinstance(batch, dict) and not are_next_tokens(wanted, batch)):
                positions = scores.shape[-1] if isinstance(scores, Tensor) else 0
                wanted = next_tokens(after_prompt(wanted, positions))
        if metrics:
            seen[0].append(readable(prediction(outputs)))
            seen[1].append(readable(wanted))
        return _tally(scores, wanted, mean.double(), len(index), padding, weights)

    places = torch.arange(int(held_out.sizes[0]), device="cpu")
    if batch_size is None:
        sample, _ = held_out.batch(0, places[:1])
        batch_size = _at_once(sum(leaf.numel() for leaf in leaves(sample)), device)
    batches = torch.split(places, batch_size)
    tally = torch.zeros(5, device=device, dtype=torch.float64)
    with in_mode(model, training=False):
        for index in batches[ranks.rank :: ranks.count]:
            tally += _in_parts(measure, index)
    total, correct, count, classed, divisor = ranks.sum({"tally": tally})["tally"].tolist()
    if not count:
        return Evaluation(math.nan, None, {})
    mean = total / divisor if divisor else math.nan
    return Evaluation(mean, correct / count if classed else None, metrics_of(metrics, *seen, padding))


def _tally(scores: Any, wanted: Any, mean: Tensor, samples: int, padding: int, weights: Tensor | None) -> Tensor:
    """What a batch with this mean loss adds to the sums; targets equal to `padding` do not count."""
    tally = torch.zeros(5, device=mean.device, dtype=torch.float64)
    tally[_COUNTED] = samples
    if is_class_target(scores, wanted):
        # the argmax of NaN is class 0, which must not count as correct
        hits = (scores.argmax(1) == wanted) & scores.amax(1).isfinite()
        counted = wanted != padding
        tally[_CORRECT], tally[_COUNTED], tally[_CLASSED] = (hits & counted).sum(), counted.sum(), 1
        each = counted if weights is None else weights.to(mean.device)[wanted.where(counted, 0).long()] * counted
        tally[_DIVISOR] = each.double().sum()
    elif isinstance(wanted, Tensor) and has_tokens(wanted):
        tally[_DIVISOR] = (wanted != IGNORED_LABEL).sum()
    else:
        tally[_DIVISOR] = samples
    # the mean over no targets is NaN
    tally[_LOSSES] = torch.where(tally[_DIVISOR] > 0, mean * tally[_DIVISOR], 0.0)
    return tally


def _class_weights(loss: object) -> Tensor | None:
    """The class weights of one of torch's losses, by which it weighs each target and divides the sum."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.weight
    if isinstance(loss, partial) and loss.func in (nn.functional.cross_entropy, nn.functional.nll_loss):
        return cast(Tensor | None, loss.keywords.get("weight"))
    return None


def _in_parts(measure: Callable[[Tensor], Tensor], index: Tensor) -> Tensor:
    """Measure some samples, split in halves if all at once do not fit into memory."""
    try:
        return measure(index)
    except (RuntimeError, MemoryError) as error:
        if len(index) == 1 or not is_out_of_memory(error):
            raise
    first, second = index.tensor_split(2)
    return _in_parts(measure, first) + _in_parts(measure, second)


def _at_once(numbers: int, device: torch.device) -> int:
    """The batch size for samples of this many numbers."""
    return SAMPLES_AT_ONCE if device.type == "cpu" else min(max(NUMBERS_AT_ONCE // max(numbers, 1), 1), 1 << 13)


def is_class_target(outputs: Any, targets: Any) -> bool:
    """Whether targets are class indices for outputs `[B, classes, …]` of more than one class."""
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and not targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[1] > 1
        and outputs.shape[2:] == targets.shape[1:]
    )


WORST = 0.1
"""The share of clients whose mean is reported separately, rounded up to whole clients."""


class Score(NamedTuple):
    """The quality of one client's model on its own samples."""

    loss: float
    accuracy: float | None
    """None if targets are not classes."""


def evaluate_clients(training: Training, state: ServerState, tests: Clients, ranks: Ranks = ALONE) -> dict[int, Score]:
    """The score of every client that has test samples; each rank evaluates its share of the clients."""
    first = first_kept(training, state.slots, state.buffers)
    sent = shared_slots(training, state.slots.only("x")), shared_buffers(training, state.buffers)
    clients = torch.nonzero(tests.sizes).flatten()[ranks.rank :: ranks.count].tolist()
    mine = {
        client: evaluate_client(training, *sent, state.kept.get(client, first), tests, client, state.round)
        for client in clients
    }
    every = {client: score for part in ranks.gather_values(mine) for client, score in part.items()}
    return dict(sorted(every.items()))


def evaluate_client(
    training: Training, sent: Slots, buffers: Buffers, kept: Slots, tests: Clients, client: int, round: int
) -> Score:
    """One client's score, from the x and buffers that the server sends and what the client keeps."""
    size = int(tests.sizes[client])
    if not size:
        raise ValueError(f"client {client} has no test samples")
    load_client(training, sent.x, buffers, kept)
    with forked_generators(training.device):
        seed_generators(training.device, key(training.seed, MODULES, round, client))  # some modules draw in eval mode
        try:
            samples = tests.batch(client, torch.arange(size, device="cpu"))
            at_once = None if is_one_tensor(tests) else training.batch_size  # as for the server's test set
            found = evaluate(training.model, samples, training.loss, batch_size=at_once, compute=training.compute)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"client {client} cannot be evaluated on its test samples: {reason}") from error
    return Score(found.loss, found.accuracy)


def distributions(scores: Mapping[int, Score]) -> dict[str, Distribution]:
    """Mean, spread and worst clients of the loss and, if all clients have one, of the accuracy.

    >>> scores = {client: Score(1.0, accuracy) for client, accuracy in enumerate([0.5, 0.75, 1.0])}
    >>> distributions(scores)["accuracy"].mean, distributions(scores)["accuracy"].worst
    (0.75, 0.5)
    """
    losses = [score.loss for score in scores.values()]
    accuracies = [score.accuracy for score in scores.values() if score.accuracy is not None]
    found = {"loss": _distribution(losses, highest_is_worst=True)} if losses else {}
    if accuracies and len(accuracies) == len(losses):
        found["accuracy"] = _distribution(accuracies, highest_is_worst=False)
    return found


def _distribution(values: list[float], *, highest_is_worst: bool) -> Distribution:
    each = torch.tensor(values, dtype=torch.float64)
    worst = each.sort(descending=highest_is_worst).values[: math.ceil(WORST * len(values))]  # NaN counts as highest
    return Distribution(float(each.mean()), float(each.std(correction=0)), float(worst.mean()), len(values))


def not_finite(tests: Clients, owner: str) -> str | None:
    """The first sample with a NaN or an infinite number, in words; None if there is none.

    `owner` names the samples, with "{}" for the client's number.
    """
    for client, size in enumerate(tests.sizes.tolist()):
        for index in torch.split(torch.arange(size, device="cpu"), SAMPLES_AT_ONCE):
            for what, tree in zip(("inputs", "targets"), tests.batch(client, index), strict=True):
                for name, leaf in named_leaves(tree).items():
                    wrong = ~leaf.isfinite().reshape(len(leaf), -1).all(dim=1)
                    if wrong.any():
                        place = int(index[wrong.cpu()][0])
                        return f"{owner.format(client)} has NaN or infinite {what}{name}, first in its sample {place}"
    return None


def check_metrics(metrics: object, test: object) -> None:
    """Reject non-mappings, and metrics without a test set."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of names and functions, such as {{'auc': auc}}, not {metrics!r}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a metric's name must be a non-empty string, not {name!r}")
        if name in ("loss", "accuracy", "train_loss"):
            raise ValueError(f"every record has a {name!r} already; give your metric another name")
        if not callable(metric):
            raise TypeError(f"the metric {name!r} must be a function of (outputs, targets), not {metric!r}")
        check_takes(f"the metric {name!r}", metric, "outputs", "targets")
    if metrics and test is None:
        raise ValueError("metrics are computed on the test set; pass test=(inputs, targets) too")


def metrics_of(
    metrics: Metrics | None, outputs: Sequence[Tensor], targets: Sequence[Tensor], padding: int = IGNORED_LABEL
) -> dict[str, float]:
    """Every metric, over the outputs and targets of all batches."""
    if not metrics or not outputs:
        return {}
    whole = _joined(outputs, padding), _joined(targets, padding)
    found = {}
    for name, metric in metrics.items():
        try:
            found[name] = float(metric(*(part.clone() for part in whole)))  # cloned, as a metric may write into them
        except Exception as error:
            shapes = " and ".join(f"{tuple(part.shape)} {part.dtype}" for part in whole)
            raise ValueError(
                f"the metric {name!r} failed on outputs and targets of {shapes}: "
                f"{type(error).__name__}: {error}. If it is undefined, return math.nan; a run with a "
                f"run_dir can be resumed from its last checkpoint with resume=True"
            ) from error
    return found


def _joined(batches: Sequence[Tensor], padding: int) -> Tensor:
    """All batches as one, padded to the longest if `collate_fn` padded each by itself."""
    longest = [max(sizes) for sizes in zip(*(batch.shape[1:] for batch in batches), strict=True)]
    whole = batches[0].new_full((sum(map(len, batches)), *longest), padding)
    for batch, part in zip(batches, torch.split(whole, [len(batch) for batch in batches]), strict=True):
        part[tuple(map(slice, batch.shape))] = batch
    return whole


def readable(batch: object) -> Tensor:
    """A batch on the CPU, in a precision that NumPy supports, so that other libraries can read it."""
    if not isinstance(batch, Tensor):
        raise ValueError(
            f"metrics need the outputs and the targets as one tensor each, not as a {type(batch).__name__}; "
            f"for others, use an observer with on_model"
        )
    batch = batch.detach().cpu()
    return batch.float() if batch.dtype in (torch.bfloat16, torch.float16) else batch
