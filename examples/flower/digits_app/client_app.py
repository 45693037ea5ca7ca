"""The client app, which runs on every node."""

from fedlalr.flower import client_app

# Names, so that only the trainer imports the functions and torch; this file is imported for every message.
TASK = "digits_app.task"
app = client_app(f"{TASK}:model", f"{TASK}:data", f"{TASK}:algorithm", f"{TASK}:settings")
