"""``cpumoe chat`` in a terminal, as a user meets it."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_models import write_tiny_model, write_tiny_tokenizer

pytest.importorskip("transformers")

from cpumoe.cli import main
from cpumoe.cli.chat import Conversation
from cpumoe.cli.line_input import History, LineInput, Typed, state_folder
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer

PATIENCE = 120.0  # seconds; other work may be running on the machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Terminal:
    """A process that believes to be in a terminal: what it shows, and a keyboard."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self._shown = b""
        self.process = process

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self, enough: Callable[[bytes], bool]) -> bytes:
        """What is shown from the last call on until it is enough."""
        end = time.monotonic() + PATIENCE
        while not enough(self._shown):
            assert time.monotonic() < end, self._shown
            if select.select([self._master], [], [], 1.0)[0]:
                try:
                    self._shown += os.read(self._master, 4096)
                except OSError:  # how Linux says that the other side is closed
                    raise AssertionError(self._shown) from None
        shown, self._shown = self._shown, b""
        return shown

    def until(self, end: bytes) -> bytes:
        return self.read(lambda shown: shown.endswith(end))

    def ask(self, question: bytes) -> bytes:
        """The answer, cut off by its length."""
        self.type(question + b"\n")
        shown = self.until(b" tokens]\r\n> ")
        return shown.removeprefix(question + b"\r\n").rpartition(b"\r\n[cut off")[0]


@contextmanager
def chat(*arguments: str, state: Path | None = None, kind: str = "dumb") -> Iterator[Terminal]:
    """``state``: the folder of the history, which is off without; ``kind``: of terminal."""
    # Ctrl-C reaches a process only from its controlling terminal.
    program = (
        "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "from cpumoe_command import main; sys.exit(main())"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", *arguments, *([] if state else ["--no-history"])],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background have it ignored
        env={**os.environ, "TERM": kind, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(state), "INPUTRC": os.devnull},
    )
    os.close(slave)
    try:
        terminal = Terminal(master, process)
        terminal.until(b"> ")
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_conversation(folder: Path) -> None:
    with chat(str(folder), "--scheme", "w4a8-g32", "--max-new-tokens", "8") as terminal:
        first = terminal.ask(b"which experts?")
        second = terminal.ask(b"and which now?")
        assert len(first) >= 8 and len(second) >= 8
        terminal.type(b"/reset\n")
        assert b"[the conversation starts anew]" in terminal.until(b"> ")
        assert terminal.ask(b"which experts?") == first
        assert terminal.ask(b"and which now?") == second
        terminal.type(b"/reset\n/system You are an expert.\n")
        assert b"[the system message is set]" in terminal.read(lambda shown: shown.count(b"]\r\n> ") == 2)
        assert terminal.ask(b"which experts?") != first
        terminal.type(b"/help\n")
        assert b"/system TEXT" in terminal.until(b"> ")
        terminal.type(b"/dance\n")
        assert b"[/dance is not known; /help lists what is]" in terminal.until(b"> ")
        terminal.type(b"/exit\n")
        assert terminal.process.wait(PATIENCE) == 0


class Editor:
    """A terminal with line editing: what readline shows besides the text tells when an answer begins."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    def answer(self, *keys: bytes) -> bytes:
        for some in keys[:-1]:
            self.terminal.type(some)
            self.terminal.until(b"... ")
        self.terminal.type(keys[-1])
        shown = self.terminal.until(b" tokens]\r\n\x1b[?2004h> ")
        return shown.rpartition(b"\x1b[?2004l\r")[2].rpartition(b"\r\n[cut off")[0]


def test_texts_of_several_lines_history_and_regen(folder: Path, tmp_path: Path) -> None:
    options = (str(folder), "--scheme", "w4a8-g32", "--max-new-tokens", "8", "--greedy")
    pasted = b"\x1b[200~def f():\r    return '\\n'\x1b[201~\r"
    block = (b'"""def f():\r', b'    return \'\\n\'"""\r')
    with chat(*options, state=tmp_path, kind="xterm") as terminal:
        editor = Editor(terminal)
        first = editor.answer(pasted)
        second = editor.answer(b"and now?\r")
        assert editor.answer(b"/regen\r") == second
        assert editor.answer(b"and now?\r") != second  # another turn
        terminal.type(b"/reset\r")
        terminal.until(b"> ")
        terminal.type(b"/regen\r")
        assert b"[there is no answer to generate again]" in terminal.until(b"> ")
        assert editor.answer(*block) == first
        assert editor.answer(b"and now?\r") == second
        terminal.type(b"/reset\r")
        terminal.until(b"> ")
        assert editor.answer(b"def f(): return '\\n'\r") != first
        terminal.type(b"/exit\r")
        assert terminal.process.wait(PATIENCE) == 0
    path = tmp_path / "cpumoe" / "chat_history"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    lines = path.read_text().splitlines()
    assert lines[0] == r"def f():\n    return '\\n'" and lines[1:3] == ["and now?", "/regen"]
    assert f'"""{lines[0]}"""' in lines and lines[-1] == "/exit"
    with chat(*options, state=tmp_path, kind="xterm") as terminal:  # another process has the history
        editor = Editor(terminal)
        terminal.type(b"\x1b[A" * len(lines))  # up, to the oldest
        assert editor.answer(b"\r") == first
        assert path.read_text().splitlines() == [*lines, lines[0]]


def test_what_is_typed_is_a_text_a_command_or_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(text: str) -> list[Typed]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        keyboard = LineInput(lambda line: None, None)
        return list(iter(keyboard.read, None))

    assert typed('  hello \n\n/system  be brief \n"""\n  /exit\n\nx\n"""\n') == [
        Typed("hello"),
        Typed(""),
        Typed("be brief", "/system"),
        Typed("  /exit\n\nx"),
    ]
    assert typed('/system """one\ntwo"""  \n"""a "b" c"""\n""""""') == [
        Typed("one\ntwo", "/system"),
        Typed('a "b" c'),
        Typed(""),
    ]
    assert typed('say """hi\n"""never\nclosed') == [Typed('say """hi'), Typed("never\nclosed")]


def test_history_is_cut_and_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    history = History(tmp_path / "state" / "history")
    assert history.load() == []
    for number in range(2001):
        history.append(f"entry\n{number}\\n\r")
    assert history.load() == [f"entry\n{number}\\n\r" for number in range(1001, 2001)]
    assert len(history.path.read_text().splitlines()) == 1000
    assert [path.name for path in history.path.parent.iterdir()] == ["history"]
    history.path.write_bytes(b"before\n\0\0\0\nafter\n")  # as a crash of the machine may leave it
    assert history.load() == ["before", "after"]

    (tmp_path / "file").write_text("")
    said: list[str] = []
    master, slave = pty.openpty()
    with os.fdopen(slave) as terminal, os.fdopen(master), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        LineInput(said.append, tmp_path / "file" / "history")
    assert said == [f"what is typed is not kept: {tmp_path}/file/history: Not a directory"]


def test_the_state_folder_is_that_of_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert state_folder({"XDG_STATE_HOME": "/state"}) == Path("/state/cpumoe")
    for environment in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert state_folder(environment) == Path("/home/someone/.local/state/cpumoe")


@pytest.mark.full
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(folder: Path) -> None:
    with chat(str(folder), "--scheme", "float", "--max-new-tokens", "2000") as terminal:
        terminal.type(b"which experts?\n")
        terminal.read(lambda shown: len(shown) > len(b"which experts?\r\n") + 5)
        terminal.type(b"\x03")
        assert terminal.until(b"\r\n> ").endswith(b"[interrupted]\r\n> ")
        # With no answer to end. Python does not see a key in the instant between the prompt and its waiting for keys.
        time.sleep(1)
        terminal.type(b"\x03")
        assert b"[Ctrl-D or /exit leaves]" in terminal.until(b"> ")
        time.sleep(1)
        terminal.type(b"\x04")
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.full
def test_reads_a_pipe(folder: Path) -> None:
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "chat", str(folder), "--scheme", "float", "--max-new-tokens", "4"],
        input=b"hello\n\n\xff\n/reset\nhello",
        capture_output=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:surrogateescape"},
        check=False,
    )
    assert done.returncode == 0 and done.stderr == b""
    answer, cut, rest = done.stdout.partition(b"\n[cut off after 4 tokens]\n")
    assert answer and rest.startswith(b"[that was not UTF-8; please type it again]\n[the conversation starts anew]\n")
    assert rest.endswith(b"anew]\n" + answer + cut)


def test_a_tokenizer_without_a_template(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert main(["chat", str(tmp_path)]) == 2
    assert "this model's tokenizer has no chat template" in capsys.readouterr().err


def test_a_template_that_refuses(tmp_path: Path) -> None:
    write_tiny_tokenizer(
        tmp_path,
        chat_template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}text",
    )
    conversation = Conversation(load_tokenizer(tmp_path), None, 10)
    with pytest.raises(ValueError, match="refuses this conversation: no system"):
        conversation.set_system("You are an expert.")
    assert conversation.ask("?")[0]


def test_the_oldest_turns_are_dropped(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    conversation = Conversation(tokenizer, context=400, max_new_tokens=1000)
    conversation.set_system("Be brief.")
    dropped = 0
    for turn in range(6):
        question = f"question {turn} " + "x" * 60
        prompt, max_new_tokens, now = conversation.ask(question)
        dropped += now
        assert len(prompt) <= 300 and max_new_tokens == 400 - len(prompt)
        text = tokenizer.decode(prompt)
        assert "Be brief." in text and question in text
        assert [f"question {n} " in text for n in range(turn + 1)] == [n >= dropped for n in range(turn + 1)]
        conversation.add(question, "y" * 10)
    assert dropped >= 2
    with pytest.raises(ValueError, match="this message has .* tokens; there is room for 400 with its answer"):
        conversation.ask("x" * 400)
    assert conversation.ask("?")[2] == 0  # what was refused has not cost a turn
    assert "question 5 " in tokenizer.decode(conversation.ask("?")[0])
