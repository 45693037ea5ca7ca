"""The pages: their Python runs, their commands exist, their tables are complete, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer

import fedlalr as fl
from fedlalr import config, flower
from fedlalr.cli import app
from fedlalr.config import Config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.rglob("*.md")} - {*DOCS.glob("results/*/**/*.md")})  # what runs wrote is no page
RECIPES = DOCS / "recipes.md"
TRANSFORMERS = DOCS / "transformers.md"
MARKS = {
    "transformers.md": pytest.mark.skip(reason="test_transformers.py runs each of its programs alone"),
    "data.md": pytest.mark.data,
    "theory.md": pytest.mark.slow,
    "flower.md": pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed"),
}
"""Pages whose examples need a data set, minutes or Flower; tests/theory compares what the theory's examples print."""

Identifiers = [str(page.relative_to(DOCS)) for page in PAGES]


class Block(NamedTuple):
    """One fenced piece of a page."""

    language: str
    text: str
    needs: str | None
    """A library that the comment before it names."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.+)\n", read(page), flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def blocks(text: str) -> list[Block]:
    pattern = r"(?:<!-- needs: (\w+) -->\n)?^```(\w+)\n(.*?)^```"
    found = re.findall(pattern, text, flags=re.S | re.M)
    return [Block(language, text, needs or None) for needs, language, text in found]


def commands(page: Path) -> list[str]:
    """The `fedlalr …` lines of a page."""
    lines = [
        line for block in blocks(read(page)) if block.language in ("sh", "console", "bash") for line in joined(block)
    ]
    stripped = [re.sub(r"^(\$ )?((?:[A-Z_]+=\S+ )*)", "", line.strip()) for line in lines]
    return [line for line in stripped if line.startswith("fedlalr ")]


def joined(block: Block) -> list[str]:
    return block.text.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=MARKS.get(page.name, ()))
        for page in PAGES
        if blocks(read(page)) and page != RECIPES
    ],
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(read(page), page.name)


@pytest.mark.parametrize("heading", sections(RECIPES))
def test_every_recipe_runs_alone(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(sections(RECIPES)[heading], heading)


def test_recipes_have_the_names_that_people_search_for() -> None:
    headings = " ".join([*sections(RECIPES), *sections(TRANSFORMERS)]).lower()
    for words in (
        "early stopping",
        "lora",
        "mixed precision",
        "learning-rate schedule",
        "gradient accumulation",
        "personalisation",
        "fairness",
        "client sampling",
        "memory-mapped data",
        "hyper-parameter search",
    ):
        assert words in headings


def execute(text: str, name: str) -> None:
    """Run the Python of a text from top to bottom."""
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(text):
        if block.language != "python" or (block.needs and importlib.util.find_spec(block.needs) is None):
            continue
        if ">>>" in block.text:
            example = doctest.DocTestParser().get_doctest(block.text, namespace, name, name, 0)
            assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
            namespace.update(example.globs)  # doctest works on a copy
        else:
            exec(compile(block.text, name, "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for line in commands(page):
        words = shlex.split(line, comments=True)
        words = words[1 : next((i for i, word in enumerate(words) if word in (">", "|", "&&")), len(words))]
        if words and words[0] not in ("--help", "--version"):
            parse(root, words, line)


def parse(command: Any, words: list[str], line: str) -> None:
    """Let the command line read its words without doing anything."""
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"{line}: there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    if "--help" not in words:
        command.make_context(command.name, list(words))


def test_settings_on_pages_are_understood() -> None:
    """Every `fedlalr run` with a preset and settings makes a configuration."""
    tried = 0
    for page in [*PAGES, ROOT / "README.md"]:
        for line in commands(page):
            words = shlex.split(line, comments=True)
            if words[1] != "run" or len(words) < 3 or words[2] not in config.presets():
                continue
            config.load(words[2], [word for word in words[3:] if re.match(r"[\w.]+=", word)])
            tried += 1
    assert tried >= 8


def test_the_page_on_the_command_line_names_every_setting() -> None:
    table = (DOCS / "command-line.md").read_text(encoding="utf-8").split("| setting |")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", table))
    assert set(Config.model_fields) <= named
    for section in ("data", "partition"):
        options = Config.model_fields[section].annotation.model_fields
        assert {f"{section}.{option}" for option in options} <= set(re.findall(r"`([a-z_.]+)`", table))
    (local,) = (line for line in table.splitlines() if line.startswith("| `local` |"))
    assert {*Config.model_fields["local"].annotation.model_fields} <= set(re.findall(r"\w+", local))


def test_every_public_name_is_documented() -> None:
    reference = set(re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.M))
    methods = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "algorithms").glob("*.md"))
    for name in {*fl.__all__, *fl.theory.__all__, *flower.__all__} - {
        "codecs",
        "data",
        "hf",
        "models",
        "reductions",
        "schedules",
        "theory",
        "ASSUMPTIONS",
    }:
        assert name in reference or f"fl.{name}(" in methods, name


def test_the_reference_of_the_commands_is_made_of_them() -> None:
    specification = importlib.util.spec_from_file_location("command_line", DOCS / "extensions" / "command_line.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    text = module.reference()
    for words in ("### fedlalr run", "### fedlalr data fetch", "| `--vary` |", "fedlalr resume runs/cifar10"):
        assert words in text
    assert "[bold]" not in text
    assert module.PLACE in (DOCS / "command-line.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=Identifiers)
def test_every_file_that_a_page_links_to_is_there(page: Path) -> None:
    for target in re.findall(r"\]\((<[^>]+>|[^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        target = target.strip("<>")
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1].split("\n\n")[0]
    named = set(re.findall(r": (\S+\.md)$", navigation, flags=re.M))
    assert named == {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_start_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands on the embedded data, one after another."""
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    for line in commands(DOCS / "quickstart.md"):
        words = shlex.split(line, comments=True)[1:]
        if words[0] in ("run", "resume", "compare", "report") and words[1] not in ("fashion", "cifar10"):
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
    assert (tmp_path / "three.html").is_file()
