"""A file is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedlalr.common.files import write_whole


@pytest.mark.skipif(os.name != "posix", reason="limits as POSIX has them")
def test_a_disk_that_is_full_leaves_the_file_that_was_there_and_nothing_else(tmp_path: Path) -> None:
    import resource

    path, limits = tmp_path / "table.md", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_whole(path, "before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "after" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["table.md"]


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    others = tmp_path / f".table.md.{os.getpid() + 1}.writing"
    others.write_text("half")
    write_whole(tmp_path / "table.md", "Δ")
    assert sorted(os.listdir(tmp_path)) == [others.name, "table.md"]
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == "Δ"
