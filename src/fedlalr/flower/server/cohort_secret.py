"""The secret that a deployment draws its cohorts from: known to the server alone, on its disk beside the checkpoints.

    run_dir/cohort-secret      64 hexadecimal digits; checkpoints have their SHA-256

It is no part of `checkpoint.json`: Flower packs the JSON files of an app's folder into what it sends to every node, and
a run directory may be in that folder.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from fedlalr.common.files import sync_folder, write_whole
from fedlalr.federation.storage.journal import RunDirectoryError, explained

FILE = "cohort-secret"


def new_secret() -> bytes:
    """A secret that nobody can guess."""
    return secrets.token_bytes(32)


def seal(secret: bytes) -> str:
    """What a checkpoint knows of a secret. It gives nothing away: nobody can try all of 2²⁵⁶."""
    return hashlib.sha256(secret).hexdigest()


def save_secret(folder: Path, secret: bytes) -> None:
    """Write the secret of a new run, before its first checkpoint."""
    with explained(f"the run directory {folder} cannot be written"):
        write_whole(folder / FILE, secret.hex())
        sync_folder(folder)


def load_secret(folder: Path, sealed: object) -> bytes:
    """Read the secret of a run that resumes. With another one it would draw other cohorts than it began with."""
    file = folder / FILE
    try:
        found = bytes.fromhex(file.read_text())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read ({error}); {_REMEDY}") from error
    if seal(found) != sealed:
        raise RunDirectoryError(f"{file} is not the secret that the run in {folder} began with; {_REMEDY}")
    return found


_REMEDY = "cohorts are drawn from it, so put the file back, or start a new run in another directory"
