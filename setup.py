"""The description for the package page: README.md, without links that only work in the repository."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^]]+)]\((?!\w+:|#)([^)\s]+)\)")


def description(text: str, repository: str | None) -> str:
    """Lead relative links and images to the repository; if it has no address, leave their text."""

    def replaced(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/HEAD/{path})" if repository else words

    return LINK.sub(replaced, text)


if __name__ == "__main__":
    from setuptools import setup

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    text = description((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository"))
    setup(long_description=text, long_description_content_type="text/markdown")
