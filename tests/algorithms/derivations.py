"""Every method again, in plain NumPy float64, straight from its published formulas.

Nothing here imports the library. Each method is one function over dictionaries of vectors, the loop over clients
written out, so that it can be read beside the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from algorithms.numpy_federation import Client, Kept, Method, Round, State, Vector

# FedLALR and its variants ------------------------------------------------------------


def fedlalr(
    beta1: float, beta2: float, momentum: str = "average", second_moment: str = "mean", eps: float | None = None
) -> Method:
    """Algorithms 1 to 3 of the FedLALR paper and the composition of the last two. With ε, the averages are corrected
    as if they had started at zero in this round."""

    def play(server: State, kept: Kept, r: Round) -> State:
        ends: list[tuple[Vector, Vector, Vector]] = []
        for client in r.clients:
            x = server["x"]
            m = np.zeros_like(x) if momentum == "restart" else server["m"]
            v = v_hat = server["v_hat"]
            for k, oracle in enumerate(client.oracles, start=1):
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                v_hat = np.maximum(v_hat, v)
                if eps is None:
                    x = x - r.lr * m / np.sqrt(v_hat)
                else:
                    x = x - r.lr * np.sqrt(1 - beta2**k) / (1 - beta1**k) * m / (np.sqrt(v_hat) + eps)
            ends.append((x, m, v_hat))
        xs, ms, v_hats = zip(*ends, strict=True)
        after = {"x": r.mean(xs), "v_hat": np.max(v_hats, axis=0) if second_moment == "max" else r.mean(v_hats)}
        return after if momentum == "restart" else after | {"m": r.mean(ms)}

    return play


def fedlada(beta1: float, beta2: float, a: float) -> Method:
    """Momentum restarts; the step mixes the adaptive one with g_a, the mean over all steps of the previous round."""

    def play(server: State, kept: Kept, r: Round) -> State:
        xs, v_hats = [], []
        for client in r.clients:
            x, m = server["x"], np.zeros_like(server["x"])
            v = v_hat = server["v_hat"]
            for oracle in client.oracles:
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                v_hat = np.maximum(v_hat, v)
                x = x - r.lr * (a * m / np.sqrt(v_hat) + (1 - a) * server["g_a"])
            xs.append(x)
            v_hats.append(v_hat)
        steps = r.mean([float(client.steps) for client in r.clients])
        return {"x": r.mean(xs), "v_hat": r.mean(v_hats), "g_a": (server["x"] - r.mean(xs)) / (r.lr * steps)}

    return play


def aligned_lalr(
    beta1: float, beta2: float, eps: float, gamma: float, kappa: float, second_moment: str, corrected: bool = False
) -> Method:
    """Restarted AMSGrad from v̂, of which the server keeps κ in every round, at least ε²; in a round every client also
    repeats γ of the server's last change."""

    def play(server: State, kept: Kept, r: Round) -> State:
        xs, v_hats = [], []
        for client in r.clients:
            x, m = server["x"], np.zeros_like(server["x"])
            v = v_hat = server["v_hat"]
            for k, oracle in enumerate(client.oracles, start=1):
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                v_hat = np.maximum(v_hat, v)
                own = m / np.sqrt(v_hat)
                if corrected:
                    own = np.sqrt(1 - beta2**k) / (1 - beta1**k) * m / (np.sqrt(v_hat) + eps)
                x = x - r.lr * own
                if gamma:
                    x = x + gamma * server["d"] / client.steps
            xs.append(x)
            v_hats.append(v_hat)
        v_hat = np.max(v_hats, axis=0) if second_moment == "max" else r.mean(v_hats)
        after = {"x": r.mean(xs), "v_hat": np.maximum(eps**2, kappa * v_hat)}
        return after | {"d": r.mean(xs) - server["x"]} if gamma else after

    return play


# Clients that run plain SGD, servers that differ ------------------------------------------------------------


def sgd(x: Vector, client: Client, lr: float) -> Vector:
    for oracle in client.oracles:
        x = x - lr * oracle(x)
    return x


def sgd_change(server: State, r: Round) -> Vector:
    """Δ: the mean over clients of (end of local SGD − start)."""
    return r.mean([sgd(server["x"], client, r.lr) - server["x"] for client in r.clients])


def fedavg(server: State, kept: Kept, r: Round) -> State:
    return {"x": r.mean([sgd(server["x"], client, r.lr) for client in r.clients])}


Exponent = Callable[[int], int]


def adam_on(
    server: State,
    change: Vector,
    number: int,
    lr: float,
    betas: tuple[float, float],
    tau: float,
    exponent: Exponent | None,
) -> State:
    """Server Adam. With a bias correction the rate is scaled by √(1−β2ⁿ)/(1−β1ⁿ) and τ still joins the raw √v, as in
    Keras (n = t) and Flower (n = t + 1)."""
    beta1, beta2 = betas
    m = beta1 * server["m"] + (1 - beta1) * change
    v = beta2 * server["v"] + (1 - beta2) * change**2
    if exponent is not None:
        lr = lr * np.sqrt(1 - beta2 ** exponent(number)) / (1 - beta1 ** exponent(number))
    return {"x": server["x"] + lr * m / (np.sqrt(v) + tau), "m": m, "v": v}


def fedadam(server_lr: float, betas: tuple[float, float], tau: float, exponent: Exponent | None = None) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        return adam_on(server, sgd_change(server, r), r.number, server_lr, betas, tau, exponent)

    return play


def fedams(server_lr: float, beta1: float, beta2: float, eps: float, option: int, corrected: bool = False) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        change = sgd_change(server, r)
        rate = server_lr * np.sqrt(1 - beta2**r.number) / (1 - beta1**r.number) if corrected else server_lr
        m = beta1 * server["m"] + (1 - beta1) * change
        v = beta2 * server["v"] + (1 - beta2) * change**2
        if option == 1:
            v_hat = np.maximum(np.maximum(server["v_hat"], v), eps)
            x = server["x"] + rate * m / np.sqrt(v_hat)
        else:
            v_hat = np.maximum(server["v_hat"], v)
            x = server["x"] + rate * m / (np.sqrt(v_hat) + eps)
        return {"x": x, "m": m, "v": v, "v_hat": v_hat}

    return play


def fedadagrad(server_lr: float, beta1: float, tau: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        change = sgd_change(server, r)
        m = beta1 * server["m"] + (1 - beta1) * change
        v = server["v"] + change**2
        return {"x": server["x"] + server_lr * m / (np.sqrt(v) + tau), "m": m, "v": v}

    return play


def fedyogi(server_lr: float, beta1: float, beta2: float, tau: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        change = sgd_change(server, r)
        m = beta1 * server["m"] + (1 - beta1) * change
        v = server["v"] - (1 - beta2) * change**2 * np.sign(server["v"] - change**2)
        return {"x": server["x"] + server_lr * m / (np.sqrt(v) + tau), "m": m, "v": v}

    return play


def fedavgm(server_lr: float, momentum: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        m = momentum * server["m"] + sgd_change(server, r)
        return {"x": server["x"] + server_lr * m, "m": m}

    return play


def slowmo(alpha: float, beta: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        x_bar = r.mean([sgd(server["x"], client, r.lr) for client in r.clients])
        u = beta * server["u"] + (server["x"] - x_bar) / r.lr
        return {"x": server["x"] - alpha * r.lr * u, "u": u}

    return play


def fednova(server: State, kept: Kept, r: Round) -> State:
    per_step = r.mean([(sgd(server["x"], client, r.lr) - server["x"]) / client.steps for client in r.clients])
    return {"x": server["x"] + r.mean([float(client.steps) for client in r.clients]) * per_step}


# Clients that correct their own steps ------------------------------------------------------------


def fedprox(mu: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        ends = []
        for client in r.clients:
            x = server["x"]
            for oracle in client.oracles:
                x = x - r.lr * (oracle(x) + mu * (x - server["x"]))
            ends.append(x)
        return {"x": r.mean(ends)}

    return play


def fedcm(a: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        directions = []
        for client in r.clients:
            x = server["x"]
            for oracle in client.oracles:
                x = x - r.lr * (a * oracle(x) + (1 - a) * server["direction"])
            directions.append((server["x"] - x) / (client.steps * r.lr))
        delta = r.mean(directions)
        steps = r.mean([float(client.steps) for client in r.clients])
        return {"x": server["x"] - r.lr * steps * delta, "direction": delta}

    return play


def scaffold(server: State, kept: Kept, r: Round) -> State:
    """Option II of SCAFFOLD. A client never seen before has c_i = 0."""
    ends, changes = [], []
    c = server["c"]
    for client in r.clients:
        c_i = kept.get(client.id, {}).get("c_i", np.zeros_like(c))
        x = server["x"]
        for oracle in client.oracles:
            x = x - r.lr * (oracle(x) - c_i + c)
        c_plus = c_i - c + (server["x"] - x) / (client.steps * r.lr)
        kept[client.id] = {"c_i": c_plus}
        ends.append(x)
        changes.append(c_plus - c_i)
    return {"x": r.mean(ends), "c": c + len(r.clients) / r.population * r.mean(changes)}


# Clients with an adaptive step of their own ------------------------------------------------------------


ServerStep = Callable[[State, Vector, int], State]


def lafedopt(beta1: float, beta2: float, eps: float, correction: str, server_step: ServerStep) -> Method:
    """Local Adam, restarted every round; `server_step(server, change, number)` is the server's optimiser."""

    def play(server: State, kept: Kept, r: Round) -> State:
        sums, changes = [], []
        for client in r.clients:
            x = server["x"]
            m, v, a, total = (np.zeros_like(x) for _ in range(4))
            for k, oracle in enumerate(client.oracles, start=1):
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                x = x - r.lr * (m / (1 - beta1**k)) / (np.sqrt(v / (1 - beta2**k)) + eps)
                a = beta1 * a + (1 - beta1) / (np.sqrt(v) + eps)
                total = total + a
            sums.append(total)
            changes.append(x - server["x"])
        if correction == "none":
            change = r.mean(changes)
        else:
            change = r.mean([d / total for d, total in zip(changes, sums, strict=True)])
            if correction == "joint":
                change = change / r.mean([1 / total for total in sums])
        return server_step(server, change, r.number)

    return play


def average_server(lr: float) -> ServerStep:
    return lambda server, change, number: {"x": server["x"] + lr * change}


def adam_server(lr: float, betas: tuple[float, float], tau: float) -> ServerStep:
    return lambda server, change, number: adam_on(server, change, number, lr, betas, tau, None)


def local_adaalter(eps: float) -> Method:
    """B is the accumulator A as of the last synchronisation; k ε² stands in for what has come since."""

    def play(server: State, kept: Kept, r: Round) -> State:
        xs, accumulators = [], []
        for client in r.clients:
            x, accumulator = server["x"], server["A"]
            for k, oracle in enumerate(client.oracles, start=1):
                g = oracle(x)
                x = x - r.lr * g / np.sqrt(server["A"] + k * eps**2)
                accumulator = accumulator + g**2
            xs.append(x)
            accumulators.append(accumulator)
        return {"x": r.mean(xs), "A": r.mean(accumulators)}

    return play


def shared_amsgrad(beta1: float, beta2: float) -> Method:
    def play(server: State, kept: Kept, r: Round) -> State:
        ends = []
        for client in r.clients:
            x, m, v = server["x"], server["m"], server["v"]
            for oracle in client.oracles:
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                x = x - r.lr * m / np.sqrt(server["v_hat"])
            ends.append((x, m, v))
        x, m, v = (r.mean(values) for values in zip(*ends, strict=True))
        return {"x": x, "m": m, "v": v, "v_hat": np.maximum(server["v_hat"], v)}

    return play


def adam(state: State, client: Client, lr: float, beta1: float, beta2: float, eps: float) -> State:
    """Adam's x, m, v and step count after a client's local steps."""
    x, m, v, count = state["x"], state["m"], state["v"], state["n"]
    for oracle in client.oracles:
        g = oracle(x)
        count = count + 1
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        x = x - lr * (m / (1 - beta1**count)) / (np.sqrt(v / (1 - beta2**count)) + eps)
    return {"x": x, "m": m, "v": v, "n": count}


def local_adam(beta1: float, beta2: float, eps: float, moments: str = "keep") -> Method:
    """Adam on every client, its moments and its step count kept from one of its rounds to the next, begun again in
    every round, or averaged like x, where the count is the mean number of steps."""

    def play(server: State, kept: Kept, r: Round) -> State:
        zero = np.zeros_like(server["x"])
        ends = []
        for client in r.clients:
            before = {"m": zero, "v": zero, "n": np.zeros(1)}
            if moments == "keep":
                before = kept.get(client.id, before)
            elif moments == "average":
                before = server
            after = adam(before | {"x": server["x"]}, client, r.lr, beta1, beta2, eps)
            if moments == "keep":
                kept[client.id] = {name: after[name] for name in ("m", "v", "n")}
            ends.append(after)
        names = ("x", "m", "v", "n") if moments == "average" else ("x",)
        return {name: r.mean([end[name] for end in ends]) for name in names}

    return play


def diloco(server_lr: float, momentum: float, beta1: float, beta2: float, eps: float) -> Method:
    """Outer gradient x − mean x_i; buf = µ buf + gradient; x steps against gradient + µ buf. Here m is −buf."""
    inner = local_adam(beta1, beta2, eps)

    def play(server: State, kept: Kept, r: Round) -> State:
        gradient = server["x"] - inner(server, kept, r)["x"]
        buffer = momentum * -server["m"] + gradient
        return {"x": server["x"] - server_lr * (gradient + momentum * buffer), "m": -buffer}

    return play


def fedadamw(beta1: float, beta2: float, eps: float, gamma: float, shapes: Sequence[tuple[int, ...]] | None) -> Method:
    """Algorithm of the FedAdamW paper, with alignment by γ/K of the last mean change, and v as the mean of each of the
    given blocks, or whole."""

    def sent(v: Vector) -> Vector:
        if shapes is None:
            return v
        sizes = [int(np.prod(shape)) for shape in shapes]
        return np.concatenate([np.full_like(part, part.mean()) for part in np.split(v, np.cumsum(sizes)[:-1])])

    def play(server: State, kept: Kept, r: Round) -> State:
        xs, vs = [], []
        for client in r.clients:
            x, m, v = server["x"], np.zeros_like(server["x"]), server["v"]
            for k, oracle in enumerate(client.oracles, start=1):
                g = oracle(x)
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g**2
                x = x - r.lr * (m / (1 - beta1**k)) / (np.sqrt(v / (1 - beta2 ** (server["t"] + k))) + eps)
                if gamma:
                    x = x + gamma * server["d"] / client.steps
            xs.append(x)
            vs.append(sent(v))
        steps = r.mean([float(client.steps) for client in r.clients])
        after = {"x": r.mean(xs), "v": r.mean(vs), "t": server["t"] + steps}
        return after | {"d": r.mean(xs) - server["x"]} if gamma else after

    return play


def fedmuon(
    beta: float,
    alpha: float,
    vector_rate: float,
    betas: tuple[float, float],
    eps: float,
    shapes: Sequence[tuple[int, ...]],
) -> Method:
    """Muon on matrices, through the singular values themselves: five times σ ← aσ + bσ³ + cσ⁵. Adam on vectors."""
    beta1, beta2 = betas

    def orthogonal(matrix: Vector) -> Vector:
        u, sigma, vh = np.linalg.svd(matrix, full_matrices=False)
        sigma = sigma / np.sqrt((sigma**2).sum())
        for _ in range(5):
            sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
        return (u * sigma) @ vh

    def parts(vector: Vector) -> list[Vector]:
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends), shapes, strict=True)]

    def joined(each: Sequence[Vector]) -> Vector:
        return np.concatenate([part.ravel() for part in each])

    def play(server: State, kept: Kept, r: Round) -> State:
        xs, ms = [], []
        for client in r.clients:
            x, momenta = server["x"], parts(server["m"])
            first = [np.zeros(shape) for shape in shapes]
            second = [np.zeros(shape) for shape in shapes]
            for k, oracle in enumerate(client.oracles, start=1):
                along = []
                for j, g in enumerate(parts(oracle(x))):
                    if g.ndim == 2:
                        momenta[j] = beta * momenta[j] + g
                        along.append(orthogonal(momenta[j]))
                    else:
                        first[j] = beta1 * first[j] + (1 - beta1) * g
                        second[j] = beta2 * second[j] + (1 - beta2) * g**2
                        root = np.sqrt(second[j] / (1 - beta2**k)) + eps
                        along.append(vector_rate * first[j] / (1 - beta1**k) / root)
                x = x - (1 - alpha) * r.lr * joined(along)
                if alpha:
                    x = x + alpha * server["d"] / client.steps
            xs.append(x)
            ms.append(joined(momenta))
        after = {"x": r.mean(xs), "m": r.mean(ms)}
        return after | {"d": r.mean(xs) - server["x"]} if alpha else after

    return play


# Two gradients in a step -------------------------------------------------------------------------------------


def mimelite(betas: tuple[float, float], eps: float | None = None) -> Method:
    """The server's momentum, or its Adam where there is an eps, held still on the clients."""
    beta1, beta2 = betas

    def play(server: State, kept: Kept, r: Round) -> State:
        scale = 1.0 if eps is None else np.sqrt(server["v"]) + eps
        xs, cs = [], []
        for client in r.clients:
            x = server["x"]
            for oracle in client.oracles:
                x = x - r.lr * ((1 - beta1) * oracle(x) + beta1 * server["m"]) / scale
            xs.append(x)
            cs.append(np.mean([oracle(server["x"]) for oracle in client.oracles], axis=0))
        c = r.mean(cs)
        new = {"x": r.mean(xs), "m": (1 - beta1) * c + beta1 * server["m"]}
        return new if eps is None else new | {"v": (1 - beta2) * c**2 + beta2 * server["v"]}

    return play


def delta_sgd(gamma: float, delta: float) -> Method:
    """A step size of each client's own, from two gradients of the same batch."""

    def play(server: State, kept: Kept, r: Round) -> State:
        xs = []
        for client in r.clients:
            before, eta, theta = server["x"], r.lr, 1.0
            x = before - eta * client.oracles[0](before)
            for oracle in client.oracles[1:]:
                g = oracle(x)
                smoothness = np.linalg.norm(g - oracle(before)) / np.linalg.norm(x - before)
                new = min(gamma / (2 * smoothness), np.sqrt(1 + delta * theta) * eta)
                theta, eta = new / eta, new
                before, x = x, x - eta * g
            xs.append(x)
        return {"x": r.mean(xs)}

    return play
