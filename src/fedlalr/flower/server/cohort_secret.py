"""The secret from which a deployment samples its cohorts: known only to the server, on disk next to the checkpoints.

    run_dir/cohort-secret      64 hexadecimal digits; checkpoints contain the SHA-256

It is not part of `checkpoint.json`: Flower sends the JSON files in an app's folder to every node, and a run directory
may be in that folder.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from fedlalr.common.files import sync_folder, write_whole
from fedlalr.federation.storage.journal import RunDirectoryError, explained

FILE = "cohort-secret"


def new_secret() -> bytes:
    """A random secret."""
    return secrets.token_bytes(32)


def seal(secret: bytes) -> str:
    """The hash of a secret, for checkpoints. It does not reveal the secret, which has 256 random bits."""
    return hashlib.sha256(secret).hexdigest()


def save_secret(folder: Path, secret: bytes) -> None:
    """Write the secret of a new run, before its first checkpoint."""
    with explained(f"the run directory {folder} cannot be written"):
        write_whole(folder / FILE, secret.hex())
        sync_folder(folder)


def load_secret(folder: Path, sealed: object) -> bytes:
    """Read the secret of a resumed run. With another secret, the run would sample other cohorts."""
    file = folder / FILE
    try:
        found = bytes.fromhex(file.read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read ({error}); {_REMEDY}") from error
    if seal(found) != sealed:
        raise RunDirectoryError(f"{file} is not the secret with which the run in {folder} started; {_REMEDY}")
    return found


_REMEDY = "cohorts are sampled from it, so restore the file, or start a new run in another directory"
