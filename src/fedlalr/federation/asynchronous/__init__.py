"""Asynchronous rounds: the server updates its model whenever enough replies have arrived (FedBuff).

- `clock.py`: `Async`, the option of `fl.run`; which clients start and which replies arrive before each update.
- `rounds.py`: the arithmetic of an update.
"""
