"""The argument parser of the command: errors come first, and on one line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

#: What ``add_command`` of a command's module gets.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # as argparse has it


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports what is wrong in one line and names the help, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help shows what is accepted\n")

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of subcommands by name."""
        actions = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return {name: command for action in actions for name, command in action.choices.items()}

    def refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Exit with a message if one of the words is no option of this parser.

        argparse looks for missing arguments first and would ask for MODEL where only an option is misspelt.
        """
        known = [option for action in self._actions for option in action.option_strings]
        for word in words:
            if word == "--":
                return
            if not _is_option(word) or _is_known(word, known):
                continue
            # Without the hyphens, which all options have in common.
            names = {option.lstrip("-"): option for option in known if option.startswith("--")}
            near = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), names, 1)
            self.error(f"unrecognized arguments: {word}" + (f"; did you mean {names[near[0]]}?" if near else ""))


def _is_option(word: str) -> bool:
    """Return whether argparse takes a word for an option: not "-", a negative number, or a word with a space."""
    return word.startswith("-") and word != "-" and " " not in word and not _NEGATIVE_NUMBER.fullmatch(word)


def _is_known(word: str, known: Sequence[str]) -> bool:
    """Return whether a word is one of the options, or the beginning of a long one; ``-vx`` is ``-v`` with a value."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        return any(option.startswith(name) for option in known)
    return name[:2] in known


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line. Exit with code 2 if they are wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = parser.commands()
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    command = commands.get(words[at]) if at < len(words) else None
    if not any(word in ("-h", "--help") for word in words) and "--version" not in words[:at]:
        parser.refuse_unknown_options(words[:at])
        if isinstance(command, Parser):
            command.refuse_unknown_options(words[at + 1 :])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        owner = commands[arguments.command]
        owner.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments
