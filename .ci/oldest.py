"""Print, as constraints for pip, the oldest version of every dependency that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for need in sum(project["optional-dependencies"].values(), project["dependencies"]):
    print(re.sub(r"(\[.*?\])?>=([^,;]+)[^;]*", r"==\2", need))
