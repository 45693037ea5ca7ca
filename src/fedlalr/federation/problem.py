"""Everything that defines a run: the model, the clients, the method and the options, checked before the first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.data.holdout import hold_out
from fedlalr.data.population import Clients, Population, as_clients
from fedlalr.data.test_set import as_test
from fedlalr.data.transforms import Transform
from fedlalr.federation.asynchronous.rounds import no_reply
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.combinations import MAX, check_combinations, features_of
from fedlalr.federation.evaluation import check_metrics
from fedlalr.federation.options import Options
from fedlalr.federation.privacy.mechanism import Mechanism
from fedlalr.federation.privacy.privacy import Privacy
from fedlalr.federation.round import Rules, ServerState
from fedlalr.federation.sampling import draw_cohort, poisson
from fedlalr.federation.schedules import depends_on_rounds, rates
from fedlalr.federation.storage.fingerprint import data_facts, facts_of
from fedlalr.federation.stragglers import Stragglers, client_speeds
from fedlalr.federation.validation import as_client_tests, check_cohort, check_data, check_observers, check_target
from fedlalr.training import Training
from fedlalr.training.calling import target_of
from fedlalr.training.options import options_in
from fedlalr.training.personal import first_kept
from fedlalr.training.torch_state import forked_generators, get_buffers, undisturbed


@dataclass(frozen=True)
class Problem:
    """A run that passed every check that can be made before the first round."""

    model: nn.Module
    """The caller's module, which is never changed."""
    training: Training
    data: Clients
    """The clients with all their samples; those of `training` lack what is held out, which depends on the seed."""
    options: Options
    rules: Rules
    cohort_size: int
    test: Clients | None
    """The test set, as the data of one client."""
    transform: Transform | None
    client_tests: Clients | None = None
    """What each client is evaluated on, if it is here."""
    speeds: Tensor | None = None
    """Local steps per virtual second of every client; None: the run has no virtual clock."""

    @cached_property
    def rate(self) -> Callable[[int], float]:
        """The clients' rate in a round (from 1)."""
        return rates(self.options.schedule, self.training.algorithm.lr, self.options.rounds)

    @classmethod
    def of(
        cls, model: nn.Module, data: object, algorithm: Algorithm, options: Options, *, remote: bool = False
    ) -> Problem:
        """Check everything, in the order in which a user would want to hear about it. The data of remote clients
        cannot be checked here."""
        options.check(model, algorithm)
        target = target_of(model, options.loss, options.target)
        clients = cast(Clients, data) if remote else as_clients(data, target, options.collate_fn)
        if options.collate_fn is None:  # it may make dicts of any samples
            check_target(options.target, data, options.test)
        check_combinations(features_of(options) | ({MAX} if "max" in algorithm.slots.up.values() else set()))
        check_observers(options.observers)
        rules = options.rules(algorithm)
        cohort_size = _cohort_size(options, algorithm, rules, len(clients))
        training = options.training(model, algorithm, clients)
        if isinstance(options.privacy, Privacy):
            options.privacy.check(algorithm, training, get_buffers(training.model))
            rules = replace(rules, mechanism=Mechanism.of(options.privacy, cohort_size, len(clients), options.rounds))
        speeds = None
        if any(each is not None for each in (options.asynchronous, options.stragglers, options.speeds)):
            speeds = client_speeds(options.speeds, len(clients), options.seed)
        if isinstance(options.stragglers, Stragglers) and speeds is not None and not remote:
            training = replace(training, most_steps=options.stragglers.most_steps(speeds))
        given = options.test if options.test is not None else getattr(clients, "test", None)
        if training.is_personal:
            if options.test is not None:
                raise ValueError(
                    "test evaluates the server's model, which is incomplete with personal parameters or "
                    "buffers='local'; evaluate every client's own model instead, with holdout=0.2 or client_tests=[…]"
                )
            given = None  # a population's own does not fit the server's model either
        transform = clients.transform if isinstance(clients, Population) else None
        check_metrics(options.metrics, given)
        test = None if given is None else as_test(given, target, options.collate_fn).to(training.device)
        client_tests, everything = None, training.clients
        if options.holdout is not None and not remote:
            own, client_tests = hold_out(training.clients, options.holdout, training.seed)
            training = replace(training, clients=own)
        elif options.client_tests is not None:
            client_tests = as_client_tests(options.client_tests, training, transform)
        with undisturbed(training.device), forked_generators(training.device):
            if not remote:
                check_data(training, training.clients, "client 0's")
                if test is not None:
                    check_data(training, test, "the test set's", "the test set", transform, bool(options.metrics))
            if options.client_tests is not None and client_tests is not None:
                check_data(training, client_tests, "client 0's test", "test set of client {}")
        return cls(model, training, everything, options, rules, cohort_size, test, transform, client_tests, speeds)

    def cohort(self, round: int, seed: int | bytes) -> Tensor:
        """The clients sampled for a round."""
        if self.rules.mechanism is not None:
            return poisson(len(self.training.clients), self.cohort_size, seed, round)
        stragglers, count = self.options.stragglers, self.cohort_size
        count = stragglers.sampled(count) if isinstance(stragglers, Stragglers) else count
        return draw_cohort(self.options.sampling, self.training.clients.sizes, count, seed, round)

    def first_kept(self, fresh: ServerState) -> Slots:
        """What a client keeps that has not taken part yet."""
        kept = first_kept(self.training, fresh.slots, fresh.buffers, self.rules.compression.residuals)
        if self.options.asynchronous is None:
            return kept
        return kept.replace(**no_reply(self.training, fresh.slots, fresh.buffers))

    @property
    def most_kept(self) -> int:
        """The most clients that keep something at the same time."""
        if self.options.asynchronous is not None and not self.clients_keep:
            return self.cohort_size  # replies that have not arrived
        return min(self.options.rounds * self.cohort_size, len(self.training.clients))

    @property
    def accuracy_every(self) -> int:
        """Rounds between two values of the accuracy, or of the loss that replaces it."""
        own = self.options.holdout is not None or self.options.client_tests is not None
        return self.options.evaluate_every if own and self.test is None else 1

    @property
    def clients_keep(self) -> bool:
        """Whether clients keep anything between their rounds."""
        training = self.training
        return bool(training.algorithm.slots.kept or self.rules.compression.residuals or training.is_personal)

    def facts(self) -> dict[str, Any]:
        """Everything the result depends on; a run can only be resumed with the same facts."""
        chosen = {each.name: getattr(self.options, each.name) for each in options_in(Options, "server")}
        chosen |= {"clients_per_round": self.cohort_size, "reduce": self.rules.reduce}
        chosen |= {"compression": self.rules.compression, "speeds": self.speeds}
        mechanism = self.rules.mechanism
        if depends_on_rounds(self.options.schedule):
            chosen["rounds"] = self.options.rounds
        elif mechanism is not None and mechanism.rounds is not None:
            chosen["rounds"] = mechanism.rounds
        if self.options.client_tests is not None and self.client_tests is not None:
            chosen["client_tests"] = data_facts(self.client_tests)
        return facts_of(self.training, self.data, self.test, chosen)


def _cohort_size(options: Options, algorithm: Algorithm, rules: Rules, population: int) -> int:
    """The number of clients whose replies a round waits for, or that train at the same time."""
    if isinstance(options.asynchronous, Async):
        options.asynchronous.check_method(algorithm, rules)
        return options.asynchronous.check_cohort(options.clients_per_round, population, options.min_clients)
    count = check_cohort(options.clients_per_round, population, options.min_clients)
    if isinstance(options.stragglers, Stragglers) and (sampled := options.stragglers.sampled(count)) > population:
        raise ValueError(
            f"oversample is {options.stragglers.oversample}, so {sampled} clients would be sampled for {count} "
            f"replies, but there are only {population}; lower clients_per_round or oversample"
        )
    return count
