"""Only `fedlalr.flower` needs Flower."""

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
import fedlalr, fedlalr.cli
import fedlalr.flower.wire.arrays, fedlalr.flower.server.state, fedlalr.flower.client.training, fedlalr.flower.export
try:
    from fedlalr.flower import client_app
except ImportError as error:
    print(error)
"""


def test_the_library_works_without_flower_and_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'fedlalr[flower]'" in done.stdout
