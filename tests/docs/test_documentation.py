"""README.md and docs/: every code block runs or says why not; limits, links and names are checked.

Blocks run in a folder with small checkpoints under the names that the pages use (``MODEL``, ``Qwen3-30B-A3B``, ...), so
they run as they are printed. A block that cannot run has a comment with the reason directly above it:
``<!-- not run: needs the network -->``. Its Python must still compile, and its ``cpumoe`` options must exist.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("openai")

from served_models import Server, serve
from tiny_models import write_tiny_model

import cpumoe
from cpumoe.cli import _COMMANDS, _parser, main

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
COMMANDS = [module.__name__.rpartition(".")[2] for module in _COMMANDS]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run: (.+) -->\n\Z")
_ASSIGNMENT = re.compile(r"([A-Z_0-9]+)=(.*)")
_ADDRESS = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Block:
    """A fenced code block; ``reason`` is why it is not run, or None."""

    place: str
    language: str
    code: str
    reason: str | None


def read_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        above = _REASON.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        yield Block(f"{page.name}:{line}", match["language"], match["code"], above and above[1])


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN = [block for block in BLOCKS if block.reason is None and block.language in ("sh", "python")]
NOT_RUN = [block for block in BLOCKS if block.reason is not None]


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


# ---- blocks that run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the blocks name."""
    folder = tmp_path_factory.mktemp("documentation")
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    write_tiny_model(folder / "FLOAT_MODEL", **sizes)
    cpumoe.quantize_checkpoint(folder / "FLOAT_MODEL", folder / "MODEL", "w4a8-g128")
    shutil.copytree(folder / "FLOAT_MODEL", folder / "Qwen3-30B-A3B")
    shutil.copytree(folder / "MODEL", folder / "Qwen3-30B-A3B-w4a8")
    text = "A router reads the token and names the experts; they answer and their answers are added.\n" * 20
    (folder / "prompt.txt").write_text("def fibonacci(n):")
    (folder / "book.txt").write_text(text)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(4)))
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return folder


_done: set[str] = set()  # commands that another page has already run


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[Server]:
    """``cpumoe serve MODEL``, on a free port."""
    with contextlib.chdir(workspace), serve("MODEL") as server:
        yield server
        assert server.stop()[0] == 0


def run_command(words: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    command = shlex.join(words)
    with monkeypatch.context() as patch:
        while match := _ASSIGNMENT.fullmatch(words[0]):
            patch.setenv(match[1], match[2])
            words = words[1:]
        assert words[0] == "cpumoe", f"{command}: this test runs cpumoe commands only; say why the block is not run"
        if words[1:] == ["serve", "MODEL", "--port", "8000"]:
            server = request.getfixturevalue("server")
            assert server.call("/health")[0] == 200 and server.answer()
            return
        assert words[1] != "serve", f"{command}: this test runs one server; say why the block is not run"
        text = b""
        if "<" in words:
            at = words.index("<")
            text = Path(words[at + 1]).read_bytes()
            words = words[:at] + words[at + 2 :]
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert main(words[1:]) == 0, command


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.place)
def test_block_runs(
    block: Block, workspace: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    if block.language == "sh":
        for words in commands_of(block.code):
            command = shlex.join(words)
            if command not in _done:
                run_command(words, request, monkeypatch)
                _done.add(command)
        return
    code = block.code
    if _ADDRESS in code:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        code = code.replace(_ADDRESS, request.getfixturevalue("server").address)
    exec(compile(code, block.place, "exec"), {"__name__": "documentation"})


# ---- blocks that do not run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_has_a_reason(page: Path) -> None:
    for block in read_blocks(page):
        assert block.reason or block.language in ("sh", "python", "text"), f"{block.place}: say why this is not run"
    assert not re.search(r"\n\n {4}\S", prose(page)), "a code block without a fence"
    assert page.read_text().count("<!-- not run:") == sum(block.reason is not None for block in read_blocks(page))


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_blocks_that_do_not_run_are_well_formed(block: Block) -> None:
    if block.language == "python":
        compile(block.code, block.place, "exec")
    for words in commands_of(block.code) if block.language == "sh" else ():
        if "cpumoe" in words and words[words.index("cpumoe") - 1] not in ("install", "--model"):
            _parser().parse_args(words[words.index("cpumoe") + 1 :])  # ends the test if an option does not exist


def option_strings(command: str) -> set[str]:
    subparsers = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return set(subparsers.choices[command]._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_of_commands_in_the_text_exist(page: Path) -> None:
    for command, rest in re.findall(rf"`(?:cpumoe )?({'|'.join(COMMANDS)})\b([^`\n]*)`", prose(page)):
        assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= option_strings(command), f"cpumoe {command}{rest}"


# ---- limits, links and names -----------------------------------------------------------------------------------------


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_the_text_exist(page: Path) -> None:
    for path in re.findall(
        r"(?<![\w./-])(?:benchmarks|core|models|src|tests)/[\w./-]+\.(?:py|cc|h|md|txt|json)\b", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_every_command_is_documented() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if f"cpumoe {name}" not in text and f"`{name}`" not in text] == []


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    sources = [
        path for folder in ("src", "core") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cc", ".h")
    ]
    read = {name for path in sources for name in re.findall(r'"(CPUMOE_[A-Z0-9_]+)"', path.read_text())}
    assert read and [name for name in sorted(read) if f"`{name}`" not in page] == []
    others = [ROOT / name for name in ("Makefile", "pyproject.toml")] + list((ROOT / "tests").rglob("*.py"))
    known = read | {name for path in others for name in re.findall(r"CPUMOE_[A-Z0-9_]+", path.read_text())}
    assert set(re.findall(r"CPUMOE_[A-Z0-9_]+", page)) <= known


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs/api.md").read_text().splitlines()
    assert [name for name in cpumoe.__all__ if name != "cpu" and f"::: cpumoe.{name}" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert [page.name for page in PAGES[1:] if f": {page.name}\n" not in navigation] == []
