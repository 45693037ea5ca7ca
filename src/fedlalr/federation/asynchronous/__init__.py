"""Asynchronous rounds: the server updates its model whenever enough replies have arrived (FedBuff).

- `settings.py`: `Async`, the option of `fl.run`.
- `clock.py`: which clients start and which replies arrive before each update.
- `rounds.py`: the arithmetic of an update.
"""
