"""The client app, which runs on every node."""

from digits_app.task import algorithm, data, model, settings
from fedlalr.flower import client_app

app = client_app(model, data, algorithm, settings)
