"""What a user types in a terminal: line editing, pasted text of several lines, and a history that is kept."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cpumoe.cli.model_arguments import is_decoded
from cpumoe_command import interrupts_raised

_QUOTES = '"""'
#: The beginning of a block: quotes alone, or as the text of a command.
_BLOCK = re.compile(rf"(/\w+[ \t]+)?{_QUOTES}")
_MAX_ENTRIES = 1000  # that are kept


@dataclass(frozen=True)
class Typed:
    """A text, or a command with its text. A block in quotes without a command is a text, whatever it begins with."""

    text: str
    command: str | None = None

    @classmethod
    def line(cls, line: str) -> Typed:
        command, _, rest = line.partition(" ")
        return cls(rest.strip(), command) if command.startswith("/") else cls(line)


class LineInput:
    """Reads texts of one or several lines from standard input.

    On a terminal, GNU readline edits lines and takes text that is pasted as one text, line breaks included (bracketed
    paste). Anywhere, a text may be a block: it begins with three quotes and ends with three at the end of a line.
    """

    def __init__(self, note: Callable[[str], None], history: Path | None) -> None:
        """``note`` prints a remark. ``history``: the file that keeps what is typed; None keeps nothing."""
        self._note = note
        self._interactive = sys.stdin.isatty()
        self._remember = _editor() if self._interactive else None
        self._history: History | None = None
        if self._remember is None or history is None:
            return
        self._history = History(history)
        try:
            for entry in self._history.load():
                self._remember(entry)
        except OSError as problem:
            self._stop_keeping(history, problem)

    def read(self) -> Typed | None:
        """Return what is typed next; None at the end of the input. An empty line is an empty text."""
        while True:
            try:
                with interrupts_raised():
                    return self._read()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                print()
                self._note("Ctrl-D or /exit leaves")
            except UnicodeDecodeError:
                self._note("that was not UTF-8; please type it again")

    def _read(self) -> Typed:
        line = self._line("> ").strip()
        start = _BLOCK.match(line)
        if start is None:
            self._keep(line)
            return Typed.line(line)
        text = self._block(line[start.end() :])
        self._keep(f"{start[0]}{text}{_QUOTES}")
        return Typed(text, None if start[1] is None else start[1].strip())

    def _block(self, first: str) -> str:
        """Return the text up to the closing quotes, or to the end of the input."""
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._line("... "))
            except EOFError:
                if self._interactive:
                    print()
                break
        else:
            lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\r\n")

    def _line(self, prompt: str) -> str:
        line = input(prompt if self._interactive else "")
        if not is_decoded(line):
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "surrogates")
        return line

    def _keep(self, entry: str) -> None:
        if self._remember is None or not entry.strip():
            return
        self._remember(entry)
        if self._history is not None:
            try:
                self._history.append(entry)
            except OSError as problem:
                self._stop_keeping(self._history.path, problem)

    def _stop_keeping(self, path: Path, problem: OSError) -> None:
        self._note(f"what is typed is not kept: {path}: {problem.strerror or problem}")
        self._history = None


def _editor() -> Callable[[str], None] | None:
    """Set up GNU readline, with which ``input`` edits lines. Return what adds to its history; None without readline."""
    try:
        import readline
    except ImportError:
        return None
    if os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off, whatever ~/.inputrc says
    readline.set_auto_history(False)  # it would keep the lines of a block one by one
    return readline.add_history


class History:
    """What was typed, in a file with an entry on each line, oldest first. Programs may append at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[str]:
        """Return the newest entries. A file that has grown to twice as many is cut to them."""
        try:
            lines = self.path.read_text("utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return []
        entries = [line for line in lines if line and "\0" not in line]  # a crash may leave zeros; readline takes none
        kept = entries[-_MAX_ENTRIES:]
        if len(entries) > 2 * _MAX_ENTRIES:
            shorter = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            self._write(shorter, "".join(f"{line}\n" for line in kept), os.O_TRUNC)
            shorter.replace(self.path)
        return [_unescaped(line) for line in kept]

    def append(self, entry: str) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(self.path, f"{_escaped(entry)}\n", os.O_APPEND)

    def _write(self, path: Path, text: str, how: int) -> None:
        # For the user alone: conversations are private.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _unescaped(line: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r"}.get(match[1], match[1]), line)


def state_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for what cpumoe remembers between runs, by the XDG base directory specification, if any."""
    given = environment.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    if Path(given).is_absolute():
        return Path(given) / "cpumoe"
    try:
        return Path.home() / ".local" / "state" / "cpumoe"
    except RuntimeError:  # a user without a home folder
        return None
