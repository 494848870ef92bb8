"""``cpumoe chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cpumoe.chat_template import ChatTemplate
from cpumoe.cli.arguments import find_models
from cpumoe.cli.line_input import LineInput, state_folder
from cpumoe.cli.model_arguments import add_model_arguments, load_chosen_model
from cpumoe.cli.sampling_arguments import (
    add_sampling_arguments,
    check_sampling_arguments,
    generation_config,
    sampling_of,
)
from cpumoe.cli.screen import Screen
from cpumoe.free_memory import available_bytes
from cpumoe.generation.model_folder import check_folder, context_length, prepare_transformers
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cpumoe.generation.session import Session

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_log = logging.getLogger(__name__)

_HELP = """\
/system TEXT  tell the model who it is; without TEXT, nothing any more
/regen        answer the last message again
/reset        forget the conversation, but not /system
/exit         leave; so does Ctrl-D
A message of several lines is pasted, or begins and ends with \"\"\".
Ctrl-C ends an answer that is being written."""


def add_command(commands: Commands) -> None:
    parser = commands.add_parser("chat", help="talk with a model", description=f"A conversation.\n\n{_HELP}")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_new_tokens=1024)
    parser.add_argument("--system", metavar="TEXT", default="", help="tell the model who it is")
    parser.add_argument(
        "--no-history",
        action="store_true",
        help="neither read nor write the file that keeps what is typed ($XDG_STATE_HOME/cpumoe/chat_history)",
    )
    parser.set_defaults(run=run)


class Conversation:
    """The messages so far, as the tokens of the next prompt.

    If they would be longer than the context, the oldest turns are dropped. At most a quarter of the context is kept
    free for the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: int | None, max_new_tokens: int) -> None:
        self._template = ChatTemplate(tokenizer)
        self.context = context
        self._max_new_tokens = max_new_tokens
        self._turns: list[tuple[str, str]] = []  # question and answer
        self._system = ""

    def set_system(self, text: str) -> None:
        """Sets the system message. If the chat template refuses it, raises ValueError and changes nothing."""
        before, self._system = self._system, text
        try:
            self._render([], "?")
        except ValueError:
            self._system = before
            raise

    def reset(self) -> None:
        self._turns = []

    def ask(self, question: str) -> tuple[list[int], int, int]:
        """The prompt, how long its answer may be, and how many turns were dropped for it."""
        turns = self._turns
        prompt = self._render(turns, question)
        if self.context is None:
            return prompt, self._max_new_tokens, 0
        reserve = min(self._max_new_tokens, self.context // 4)
        while turns and len(prompt) + reserve > self.context:
            turns = turns[1:]
            prompt = self._render(turns, question)
        room = self.context - len(prompt)
        if room < 1:
            raise ValueError(f"this message has {len(prompt)} tokens; there is room for {self.context} with its answer")
        dropped = len(self._turns) - len(turns)
        self._turns = turns
        return prompt, min(self._max_new_tokens, room), dropped

    def add(self, question: str, answer: str) -> None:
        self._turns = [*self._turns, (question, answer)]

    def take_back(self) -> tuple[str, str] | None:
        """Removes the last turn, and returns its question and answer; None if there is no turn."""
        if not self._turns:
            return None
        *self._turns, last = self._turns
        return last

    def _render(self, turns: list[tuple[str, str]], question: str) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return self._template.prompt([*messages, {"role": "user", "content": question}])


def _note(line: str) -> None:
    print(f"[{line}]", flush=True)


def run(arguments: argparse.Namespace) -> int:
    check_sampling_arguments(arguments)
    find_models(arguments, "model")
    check_folder(arguments.model)
    prepare_transformers()
    from cpumoe.generation.memory import free_bytes_with
    from cpumoe.generation.session import Session

    sampling = sampling_of(arguments, generation_config(arguments.model))
    tokenizer = load_tokenizer(arguments.model)
    conversation = Conversation(tokenizer, context_length(arguments.model), arguments.max_new_tokens)
    conversation.set_system(arguments.system)  # also finds a missing chat template before the model is loaded
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that is not UTF-8 gets "?"
    folder = None if arguments.no_history else state_folder()
    history = None if folder is None else folder / "chat_history"
    available = available_bytes()
    model = load_chosen_model(arguments)
    free = free_bytes_with(model, available)
    with Session(model, tokenizer, sampling, arguments.stop or (), free_bytes=free) as session:
        conversation.context = min(filter(None, (conversation.context, session.token_limit)), default=None)
        _talk(session, conversation, history)
    return 0


def _talk(session: Session, conversation: Conversation, history: Path | None) -> None:
    if sys.stdin.isatty():
        _note("/help tells what else can be typed")
    keyboard = LineInput(_note, history)
    while (typed := keyboard.read()) is not None:
        if typed.command is None:
            if typed.text.strip():
                _turn(conversation, session, typed.text)
        elif typed.command == "/exit":
            break
        elif typed.command == "/help":
            print(_HELP)
        elif typed.command == "/reset":
            conversation.reset()
            _note("the conversation starts anew")
        elif typed.command == "/regen":
            _regenerate(conversation, session)
        elif typed.command == "/system":
            _set_system(conversation, typed.text)
        else:
            _note(f"{typed.command} is not known; /help lists what is")


def _regenerate(conversation: Conversation, session: Session) -> None:
    taken = conversation.take_back()
    if taken is None:
        _note("there is no answer to generate again")
        return
    if not _turn(conversation, session, taken[0]):
        conversation.add(*taken)  # interrupted before the first word: the old answer stays


def _turn(conversation: Conversation, session: Session, question: str) -> bool:
    """Asks and prints the answer. Returns whether there was one."""
    try:
        prompt, max_new_tokens, dropped = conversation.ask(question)
    except ValueError as problem:  # the conversation goes on without this message
        _note(str(problem))
        return False
    if dropped:
        _note(f"the conversation would pass the model's context: the oldest {dropped} turn(s) were dropped")
    screen = Screen(sys.stdout)
    answer = session.answer(prompt, max_new_tokens, screen.show_answer, screen.show_reasoning)
    print(flush=True)
    if answer.finish == "interrupt":
        _note("interrupted")
    elif answer.finish == "length":
        _note(f"cut off after {max_new_tokens} tokens")
    _log.info("%d prompt tokens were in the cache; %s", answer.prompt_tokens - answer.prefilled, answer.summary())
    if answer.text:  # it may be cut or interrupted before the first word, or in the reasoning
        conversation.add(question, answer.text)
    return bool(answer.text)


def _set_system(conversation: Conversation, text: str) -> None:
    try:
        conversation.set_system(text)
        _note("the system message is set" if text else "there is no system message any more")
    except ValueError as problem:
        _note(str(problem))
