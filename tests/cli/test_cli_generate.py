"""``cpumoe generate``, and what it shares with ``chat``: text in pieces, and prompts that begin alike."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny_model, write_tiny_tokenizer

pytest.importorskip("transformers")

import cpumoe
from cpumoe.chat_template import ChatTemplate
from cpumoe.cli import main
from cpumoe.generation.model_folder import prepare_transformers
from cpumoe.generation.session import Session
from cpumoe.generation.text import TextPieces
from cpumoe.integrations.transformers.adapter import native_with_head
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.steps.sampling import Sampling

GREEDY = Sampling()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(arguments: Any) -> None:
        raise AssertionError("a model was loaded for what had to be refused before")

    monkeypatch.setattr("cpumoe.cli.generate.load_chosen_model", load_model)


def test_prints_the_text_and_one_line_of_speeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", str(folder), "The experts", "--scheme", "w4a8-g32", "--max-new-tokens", "12"]
    assert main(arguments) == 0
    streamed = capsys.readouterr()
    assert streamed.err.splitlines()[-1].startswith("2 prompt tokens, 12 generated; prefill ")
    assert "tokens/s, decode " in streamed.err and "GiB" in streamed.err
    assert main([*arguments, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed.out
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["text"] + "\n" == streamed.out
    assert (facts["prompt_tokens"], facts["generated_tokens"], facts["finish"]) == (2, 12, "length")
    assert facts["prefill_seconds"] > 0 and facts["decode_seconds"] > 0 and facts["peak_memory_bytes"] > 0


def test_keys_and_values_in_int8(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(folder), "The experts", "--scheme", "w4a8-g32", "--max-new-tokens", "12", "--json"]
    assert main([*arguments, "--kv-cache", "int8"]) == 0
    asked = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setenv("CPUMOE_KV_CACHE", "int8")
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["text"] == asked
    monkeypatch.setenv("CPUMOE_STEPS", "0")
    assert main(arguments) == 2
    assert "CPUMOE_KV_CACHE='int8' is for models whose steps are one call" in capsys.readouterr().err


def test_prompts_from_files_and_chat(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--scheme", "float", "--max-new-tokens", "3", "--json"]

    def tokens(*arguments: str) -> int:
        assert main(["generate", str(folder), *arguments, *options]) == 0
        return int(json.loads(capsys.readouterr().out)["prompt_tokens"])

    file = tmp_path / "prompt.txt"
    file.write_text("The experts é", encoding="utf-8")
    assert tokens("--prompt-file", str(file)) == tokens("The experts é")
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert tokens("--prompt-file", "-") == tokens("The experts é")
    assert tokens("The experts", "--chat") == len(
        load_tokenizer(folder).encode("<|im_start|>user\nThe experts<|im_end|>\n<|im_start|>assistant\n")
    )


def test_sampling(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        sampled = ["--scheme", "float", "--max-new-tokens", "8", "--temperature", "1"]
        assert main(["generate", str(folder), "The", *sampled, *options]) == 0
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1") != text("--seed", "2")
    assert text("--seed", "1") != text("--seed", "1", "--top-k", "2") != text("--seed", "1", "--top-p", "0.01")


def test_sampling_from_the_best_is_greedy(counting_on: CountingOn) -> None:
    counting = counting_on("qwen3_moe", "float")
    prompt = counting.tokenizer.encode("The")
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6), Sampling(1e-6)):
        with Session(counting.model, counting.tokenizer, sampling) as session:
            assert session.answer(prompt, 16, lambda piece: None).tokens == counting.fresh(prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--prompt-file", "y"], "both PROMPT and --prompt-file are given"),
        ([""], "PROMPT is empty"),
        (["\udcff"], "PROMPT is not UTF-8"),
        (["--prompt-file", "/nowhere/text"], "No such file"),
        (["x", "--max-new-tokens", "2048"], "the model's context of 2048"),
        (["x " * 3000], "the model's context of 2048"),
    ],
)
def test_refuses(
    arguments: list[str], message: str, folder: Path, no_loading: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "a whole number from 1"),
        (["--temperature", "-1"], "a number from 0"),
        (["--temperature", "nan"], "a number from 0"),
        (["--top-p", "1.5"], "above 0 and up to 1"),
        (["--top-k", "x"], "a whole number from 1"),
        (["--min-p", "0"], "above 0 and up to 1"),
        (["--seed", str(2**64)], f"a whole number from 0 to {2**64 - 1}"),
        (["--stop", ""], "a text of a character or more"),
    ],
)
def test_refuses_numbers(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["generate", "folder", "x", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_refuses_files(folder: Path, tmp_path: Path, no_loading: None, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert main(["generate", *arguments]) == 2
        return capsys.readouterr().err

    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "latin is not UTF-8: unexpected end of data at byte 3" in told(
        str(folder), "--prompt-file", str(tmp_path / "latin")
    )
    assert "there is no such folder" in told(str(tmp_path / "nothing"), "x")
    assert "no config.json" in told(str(tmp_path), "x")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "there is no tokenizer" in told(str(tmp_path), "x")
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be read" in told(str(tmp_path), "x")
    write_tiny_tokenizer(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in told(str(tmp_path), "x", "--chat")


def test_pieces_are_whole_characters(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = "héllo 日本語 🎉 and the experts\n" * 20
    tokens = tokenizer.encode(text)
    assert len(tokens) > 5 * TextPieces._WINDOW
    stream = TextPieces(tokenizer)
    pieces = [stream.add([token]) for token in tokens]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert stream.rest() == ""
    # Half a character is never printed, unless nothing more comes.
    stream = TextPieces(tokenizer)
    half = tokenizer.encode("a🎉")[:-1]
    assert "".join(stream.add([token]) for token in half) == "a"
    assert stream.rest() == "\ufffd"


def test_pieces_of_random_bytes(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokens = torch.randint(4, len(tokenizer), (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    stream = TextPieces(tokenizer)
    assert "".join(stream.add([token]) for token in tokens) + stream.rest() == tokenizer.decode(tokens)


def test_pieces_where_bytes_are_tokens_of_their_own() -> None:
    """Such decoders take back characters that they have shown, as long as more bytes follow."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"word": 256}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    text = "é日本🎉" * 40
    stream = TextPieces(PreTrainedTokenizerFast(tokenizer_object=backend))
    pieces = [stream.add([token]) for token in [*text.encode(), 256]]
    assert "".join(pieces) == text + "word" and not any("\ufffd" in piece for piece in pieces)


class Counting:
    """A session on a model in fp32, and the tokens that each of its steps or forward passes computed."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self.model = cpumoe.load_model(folder, scheme=scheme, dtype=torch.float32)
        self.tokenizer = load_tokenizer(folder)
        self.session = Session(self.model, self.tokenizer, GREEDY)
        self.computed: list[int] = []
        if (native := native_with_head(self.model)) is None:
            self.model.register_forward_pre_hook(
                lambda module, positional, named: self.computed.append(named["input_ids"].shape[1]), with_kwargs=True
            )
            return
        compute = native.step_rows

        def count(model: Any, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
            self.computed.append(len(tokens))
            return compute(model, tokens, *others)

        native.step_rows = count

    def fresh(self, prompt: list[int]) -> list[int]:
        with Session(self.model, self.tokenizer, GREEDY) as session:
            return session.answer(prompt, 16, lambda piece: None).tokens


CountingOn = Callable[[str, str], Counting]


@pytest.fixture
def counting_on(tmp_path: Path) -> Iterator[CountingOn]:
    """Makes sessions on tiny models of an architecture with a scheme."""
    with ExitStack() as sessions:

        def make(architecture: str, scheme: str) -> Counting:
            counting = Counting(write_tiny_model(tmp_path, architecture), scheme)
            sessions.enter_context(counting.session)
            return counting

        yield make


@pytest.mark.parametrize(
    ("architecture", "scheme", "unit"),
    [
        ("qwen3_moe", "float", 1),
        ("qwen3_moe", "w4a8-g32", 16),
        ("qwen3_next", "float", 1),
        ("qwen3_next", "w4a8-g32", 1),
    ],
)
def test_a_prompt_that_begins_alike_is_not_read_twice(
    architecture: str, scheme: str, unit: int, counting_on: CountingOn
) -> None:
    """With a KV cache in pages, the last of which is computed again, or with states; without a native decoder too."""
    counting = counting_on(architecture, scheme)
    prompt = ChatTemplate(counting.tokenizer).prompt([{"role": "user", "content": "Which experts?"}])
    question: list[int] = []
    for turn in range(3):
        expected = counting.fresh(prompt)
        counting.computed.clear()
        answer = counting.session.answer(prompt, 16, lambda piece: None)
        assert answer.tokens == expected
        known = 0 if turn == 0 else (len(prompt) - len(question) - 1) // unit * unit  # without an answer's last token
        assert answer.prefilled == len(prompt) - known and counting.computed[-16:] == [answer.prefilled] + [1] * 15
        tries_states = (architecture, scheme, turn) == ("qwen3_next", "float", 1)  # whether the model reads them
        assert len(counting.computed) == 16 + 4 * tries_states
        question = counting.tokenizer.encode(f" And {turn}?")
        prompt = [*prompt, *answer.tokens, *question]
    # A conversation that took another way shares its beginning only; states are those of the end.
    other = [*prompt[:20], 7, 8, 9]
    expected = counting.fresh(other)
    answer = counting.session.answer(other, 16, lambda piece: None)
    assert answer.tokens == expected
    assert answer.prefilled == (23 if architecture == "qwen3_next" else 23 - 20 // unit * unit)


@pytest.mark.parametrize("scheme", ["float", "w4a8-g32"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3"])
def test_reuse_with_other_kinds_of_attention(architecture: str, scheme: str, counting_on: CountingOn) -> None:
    """gpt-oss forgets what has left its window (16 tokens here), and cannot go back behind it."""
    counting = counting_on(architecture, scheme)
    prompt = counting.tokenizer.encode("A router reads the token and names the experts")
    answer = counting.session.answer(prompt, 16, lambda piece: None)
    for following in ([*prompt, *answer.tokens, 40, 41], [*prompt[:-3], 40, 41, 42]):
        assert counting.session.answer(following, 16, lambda piece: None).tokens == counting.fresh(following)


@pytest.mark.parametrize("scheme", ["float", "w4a8-g32"])
def test_reuse_after_an_interrupt(scheme: str, counting_on: CountingOn) -> None:
    counting = counting_on("qwen3_moe", scheme)
    prompt = counting.tokenizer.encode("A router reads the token " * 4)
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 6:
            raise KeyboardInterrupt

    answer = counting.session.answer(prompt, 1000, interrupt)
    assert "".join(pieces).startswith(answer.text[:5])
    assert answer.finish == "interrupt" and 6 <= len(answer.tokens) < 1000
    following = [*prompt, *answer.tokens[:4], 40, 41]
    expected = counting.fresh(following)
    answer = counting.session.answer(following, 16, lambda piece: None)
    assert answer.tokens == expected and answer.prefilled <= 2 + 16


def test_an_engine_that_fails(counting_on: CountingOn) -> None:
    counting = counting_on("qwen3_moe", "w4a8-g32")

    def fail(*_: Any) -> None:
        raise RuntimeError("a broken step")

    native_with_head(counting.model).step_rows = fail
    with pytest.raises(RuntimeError, match="could not compute this request"):
        counting.session.answer([5], 4, lambda piece: None)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_cache_takes_memory_for_the_tokens_that_there_are(counting_on: CountingOn) -> None:
    counting = counting_on("qwen3_moe", "w4a8-g32")
    assert counting.session.token_limit == 2048  # the model's context
    before = resident_bytes()
    with Session(counting.model, counting.tokenizer, GREEDY, tokens=999_999) as session:
        native = native_with_head(counting.model)
        assert session.token_limit == 1_000_000 and native.token_bytes * 1_000_000 > 500e6
        assert session.answer([5] * 100, 16, lambda piece: None).tokens
        assert resident_bytes() - before < 100e6
    with (
        Session(counting.model, counting.tokenizer, GREEDY, tokens=20) as session,
        pytest.raises(RuntimeError, match="1 tokens and 100 for the answer; there is room for 32 in all"),
    ):
        session.answer([5], 100, lambda piece: None)


def test_conversations_that_are_over_take_no_memory(counting_on: CountingOn) -> None:
    counting = counting_on("qwen3_moe", "w4a8-g32")
    with Session(counting.model, counting.tokenizer, GREEDY) as session:
        for first in range(5, 25):
            assert session.answer([first] * 100, 4, lambda piece: None).tokens
        pool = session._engine._schedules.groups[0].pool
        assert len(pool._holders) - len(pool._blank) <= -(-104 // 16)


def test_transformers_stays_off_the_network() -> None:
    prepare_transformers()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
