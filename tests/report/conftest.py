from pathlib import Path

import pytest

from report.run_folders import make_comparison


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds; made once."""
    return make_comparison(tmp_path_factory.mktemp("report") / "runs")
