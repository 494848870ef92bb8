"""Calibration text: what is read of it, what it costs, and that what is wrong with it leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import first_of
from tiny_architectures import write_float
from tiny_models import write_tiny_model, write_tiny_tokenizer
from transformers import AutoTokenizer

import cpumoe
from cpumoe import CheckpointError
from cpumoe.demo.model import FOLDER
from cpumoe.quantization import calibration_text
from cpumoe.quantization.calibration_text import read_sequences

SENTENCE = "The experts that a token does not choose cost it nothing.\n"


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("float") / "model")


@pytest.fixture(scope="module")
def tokenizer(float_model):
    return AutoTokenizer.from_pretrained(float_model)


def whole_text_rule(texts, tokenizer, samples, length):
    """What is used of a small file, as simply as it can be said."""
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    length = min(length, len(ids))
    sequences = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    return torch.tensor(sequences[:: max(1, len(sequences) // samples)][:samples])


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=80), min_size=1, max_size=8),
    samples=st.integers(1, 6),
    length=st.integers(2, 40),
    lines=st.booleans(),
)
def test_of_a_small_file_all_is_used(tokenizer, tmp_path_factory, texts, samples, length, lines):
    folder = tmp_path_factory.mktemp("text")
    texts = [*texts, SENTENCE] if lines else ["".join(texts) + SENTENCE]
    path = folder / ("a.jsonl" if lines else "a.txt")
    content = "\n\n".join(json.dumps({"text": t, "id": 3}) for t in texts) if lines else texts[0]
    path.write_bytes(content.encode())
    assert torch.equal(
        read_sequences(path, tokenizer, samples, length), whole_text_rule(texts, tokenizer, samples, length)
    )


def test_the_shipped_model_is_calibrated_with_the_same_sequences_as_ever(tmp_path):
    """Lines of some kilobytes, more of them than are used, and a tokenizer that puts a token before each."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    held_out = (Path(__file__).parents[1] / "data" / "heldout.txt").read_text()
    texts = [held_out[i : i + 14_000] for i in range(0, len(held_out), 14_000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ids = read_sequences(tmp_path / "a.jsonl", tokenizer, 12, 1024)
    assert ids.shape == (12, 1024) and torch.equal(ids, whole_text_rule(texts, tokenizer, 12, 1024))


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_of_a_large_file_places_are_used_that_are_evenly_spaced(tokenizer, tmp_path, monkeypatch, lines, ending):
    monkeypatch.setattr(calibration_text, "_SMALL_BYTES", 0)
    samples, length = 7, 20
    parts = [f"{number:06} äöü 語 words that follow\n" for number in range(4000)]
    content = "".join(json.dumps({"text": part}) + "\n" for part in parts) if lines else "".join(parts)
    path = tmp_path / ("a.jsonl" if lines else "a.txt")
    path.write_text(content.rstrip("\n") + ending)
    ids = read_sequences(path, tokenizer, samples, length)
    assert ids.shape == (samples, length) and torch.equal(ids, read_sequences(path, tokenizer, samples, length))
    starts = [int(tokenizer.decode(sequence)[:6]) for sequence in ids]
    assert starts == pytest.approx([number * 4000 / samples for number in range(samples)], abs=2)
    every = "".join(parts)
    assert all(tokenizer.decode(sequence) in every for sequence in ids)


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=400),
    samples=st.integers(1, 9),
    at_once=st.integers(8, 50),  # two of the longest characters; 32 bytes is the least that is read
)
def test_text_is_cut_between_characters_and_none_is_lost(tmp_path_factory, text, samples, at_once):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    raw = text.encode()
    path.write_bytes(raw)
    with path.open("rb") as file:
        pieces = list(calibration_text._plain_text(file, 0, at_once))
        assert b"".join(piece.raw for piece in pieces) == raw
        assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        for piece in pieces:
            piece.raw.decode()
        for number in range(samples):
            following = b"".join(p.raw for p in calibration_text._plain_text(file, number * len(raw) // samples, 64))
            following.decode()
            assert raw.endswith(following)


def test_messages_go_through_the_chat_template(float_model, tokenizer, tmp_path):
    chat = [{"role": "user", "content": "Which expert?"}, {"role": "assistant", "content": "The second."}]
    lines = [json.dumps({"messages": chat}), json.dumps({"text": "plain words"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines * 20))
    expected = (
        (tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"])
        + tokenizer("plain words")["input_ids"]
    )
    ids = read_sequences(tmp_path / "a.jsonl", tokenizer, 20, len(expected))
    assert ids.tolist() == [expected] * 20
    report = cpumoe.quantize_checkpoint(
        float_model, tmp_path / "q", "w4a8-g32", calibration=tmp_path / "a.jsonl", calibration_length=64
    )
    assert report.tokens == len(expected) * 20 // 64 * 64


def test_a_chat_template_marks_the_beginning_itself(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = "<|begin|>{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "import os"}]}))
    ids = read_sequences(tmp_path / "a.jsonl", tokenizer, 1, 512)[0].tolist()
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


# ---- what is wrong --------------------------------------------------------------------------------------------------

_USER = {"role": "user", "content": "x"}
BAD_TEXTS = {
    "a.jsonl": (b'{"text": "fine"}\n{"words": 3}\n', r"line 2 has 'words'; accepted is .*text.*messages"),
    "b.jsonl": (b"not json\n", "line 1 is not JSON"),
    "c.jsonl": (b'{"text": "fine"}\n\n[1]\n', "line 3 is no object"),
    "d.jsonl": (b'{"text": "\\ud800"}\n', "line 1 is not text"),
    "e.jsonl": (b'{"text": "\xff"}\n', "line 1 is not UTF-8"),
    "f.jsonl": (b'{"messages": [3]}\n', "line 1: messages holds 3; JSON objects are accepted"),
    "g.jsonl": (b'{"messages": []}\n', "line 1 has 'messages'"),
    "h.jsonl": (b'{"text": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    "i.jsonl": (b"\n\n", "has 0 tokens"),
    "c.txt": (b"fine \xff\xfe\x00", "not UTF-8 text.* at byte 5"),
    "d.txt": (b"", "has 0 tokens"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_text_is_refused_and_leaves_nothing_behind(float_model, tmp_path, name):
    content, problem = BAD_TEXTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", calibration=tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_the_corrected_run_is_not_in_the_way_of_the_failed_one(float_model, tmp_path):
    text = tmp_path / "text.txt"
    with pytest.raises(FileNotFoundError, match="text.txt does not exist"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", calibration=text)
    text.write_bytes(b"")
    with pytest.raises(ValueError, match="0 tokens"):
        cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", calibration=text)
    text.write_text(SENTENCE * 40)
    assert cpumoe.quantize_checkpoint(float_model, tmp_path / "q", "w4a8-g32", calibration=text).tokens > 0


def test_messages_without_a_chat_template_are_refused_with_the_cure(tmp_path):
    source = write_float(tmp_path / "float", "qwen3_moe", vocab_size=300)
    write_tiny_tokenizer(source, chat_template=None)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [_USER]}))
    with pytest.raises(ValueError, match=r"line 1 has messages.*no chat template.*chat_template\.jinja"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32", calibration=tmp_path / "a.jsonl")
    assert not (tmp_path / "q.partial").exists()


def test_a_tokenizer_that_does_not_fit_or_is_not_there_leaves_nothing_behind(tmp_path):
    source = write_float(tmp_path / "float", "qwen3_moe", vocab_size=128)
    (tmp_path / "a.txt").write_text(SENTENCE)
    options = {"calibration": tmp_path / "a.txt"}
    with pytest.raises(CheckpointError, match=r"no tokenizer.*copy tokenizer\.json"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32", **options)
    write_tiny_tokenizer(source)
    with pytest.raises(CheckpointError, match="the model knows 128; put the tokenizer of this model"):
        cpumoe.quantize_checkpoint(source, tmp_path / "q", "w4a8-g32", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "float"]


def test_without_transformers_the_cure_is_named_and_nothing_left_behind(float_model, tmp_path):
    (tmp_path / "a.txt").write_text(SENTENCE)
    code = "import sys; sys.modules['transformers'] = None\nfrom cpumoe.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["quantize", float_model, tmp_path / "q", "--scheme", "w4a8-g32", "--calibration", tmp_path / "a.txt"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'cpumoe[transformers]'" in done.stderr
    assert not (tmp_path / "q.partial").exists()


# ---- what it costs --------------------------------------------------------------------------------------------------

_MEMORY = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from cpumoe.quantization.calibration_text import read_sequences
def memory(key):
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
before = memory('VmRSS')
assert read_sequences(Path(sys.argv[2]), tokenizer, 128, 512).shape == (128, 512)
print(memory('VmHWM') - before)
"""


@pytest.mark.parametrize(("megabytes", "lines"), first_of([(60, True), (60, False), (3, False)], 1))
def test_memory_does_not_grow_with_the_file(tmp_path, megabytes, lines):
    path = tmp_path / ("a.jsonl" if lines else "a.txt")
    line = json.dumps({"text": SENTENCE * 40}) + "\n" if lines else SENTENCE
    path.write_text(line * (megabytes * 1_000_000 // len(line)))
    command = [sys.executable, "-c", _MEMORY, FOLDER, path]
    kilobytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert kilobytes < 150_000
