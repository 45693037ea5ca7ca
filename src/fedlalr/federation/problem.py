"""Everything that defines a run: the model, the clients, the method and the options, checked before the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.data.holdout import hold_out
from fedlalr.data.population import Clients, Population
from fedlalr.data.test_set import as_test
from fedlalr.data.transforms import Transform
from fedlalr.federation.combinations import MAX, check_combinations
from fedlalr.federation.metrics import check_metrics
from fedlalr.federation.options import Options
from fedlalr.federation.privacy.mechanism import Mechanism
from fedlalr.federation.privacy.privacy import Privacy
from fedlalr.federation.round import Rules
from fedlalr.federation.sampling import draw_cohort, poisson
from fedlalr.federation.schedules import depends_on_rounds
from fedlalr.federation.storage.fingerprint import data_facts, facts_of
from fedlalr.federation.validation import (
    as_client_tests,
    check_client_tests,
    check_cohort,
    check_no_test,
    check_observers,
    check_problem,
)
from fedlalr.training import Training
from fedlalr.training.calling import target_of
from fedlalr.training.options import options_in
from fedlalr.training.torch_state import forked_generators, get_buffers, undisturbed


@dataclass(frozen=True)
class Problem:
    """A run that passed every check that can be made before the first round."""

    model: nn.Module
    """The caller's module, which is never changed."""
    training: Training
    options: Options
    rules: Rules
    cohort_size: int
    test: Clients | None
    """The test set, as the data of one client."""
    transform: Transform | None
    client_tests: Clients | None = None
    """What each client is evaluated on, if it is here."""

    @classmethod
    def of(
        cls, model: nn.Module, clients: Clients, algorithm: Algorithm, options: Options, *, remote: bool = False
    ) -> Problem:
        """Check everything, in the order in which a user would want to hear about it. The data of remote clients
        cannot be checked here."""
        options.check(model, algorithm)
        check_combinations(options.features | ({MAX} if "max" in algorithm.slots.up.values() else set()))
        check_observers(options.observers)
        cohort_size = check_cohort(options.clients_per_round, len(clients), options.min_clients)
        rules = options.rules(algorithm)
        training = options.training(model, algorithm, clients)
        if isinstance(options.privacy, Privacy):
            options.privacy.check(algorithm, training, get_buffers(training.model))
            rules = replace(rules, mechanism=Mechanism.of(options.privacy, cohort_size, len(clients), options.rounds))
        given = options.test if options.test is not None else getattr(clients, "test", None)
        if training.is_personal:
            check_no_test(options.test)
            given = None  # a population's own does not fit the server's model either
        transform = clients.transform if isinstance(clients, Population) else None
        check_metrics(options.metrics, given)
        target = target_of(model, options.loss, options.target)
        test = None if given is None else as_test(given, target, options.collate_fn).to(training.device)
        client_tests = None
        if options.holdout is not None and not remote:
            own, client_tests = hold_out(training.clients, options.holdout, training.seed)
            training = replace(training, clients=own)
        elif options.client_tests is not None:
            client_tests = as_client_tests(options.client_tests, training, transform)
        with undisturbed(training.device), forked_generators(training.device):
            if not remote:
                check_problem(training, test)
            if options.client_tests is not None and client_tests is not None:
                check_client_tests(training, client_tests)
        return cls(model, training, options, rules, cohort_size, test, transform, client_tests)

    def cohort(self, round: int, seed: int | bytes) -> Tensor:
        """The clients sampled for a round."""
        if self.rules.mechanism is not None:
            return poisson(len(self.training.clients), self.cohort_size, seed, round)
        return draw_cohort(self.options.sampling, self.training.clients.sizes, self.cohort_size, seed, round)

    @property
    def accuracy_every(self) -> int:
        """Rounds between two values of the accuracy."""
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
        chosen |= {"compression": self.rules.compression}
        mechanism = self.rules.mechanism
        if depends_on_rounds(self.options.schedule):
            chosen["rounds"] = self.options.rounds
        elif mechanism is not None and mechanism.rounds is not None:
            chosen["rounds"] = mechanism.rounds
        if self.options.client_tests is not None and self.client_tests is not None:
            chosen["client_tests"] = data_facts(self.client_tests)
        return facts_of(self.training, self.training.clients, self.test, chosen)
