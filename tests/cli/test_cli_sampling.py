"""How ``generate`` chooses tokens and where it stops: as the model's generation_config says, unless told otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe.cli import main
from cpumoe.generation.session import Session
from cpumoe.generation.stop_strings import StopAutomaton, StopStrings
from cpumoe.integrations.transformers.layout.tokenizer import load_tokenizer
from cpumoe.steps.sampling import Sampling

PROMPT = "The experts"
LENGTH = 24


@pytest.fixture(scope="module")
def greedy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its generation_config says nothing of sampling."""
    return write_tiny_model(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def sampling_model(greedy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "model"
    shutil.copytree(greedy_model, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


Generated = Callable[..., str]


@pytest.fixture
def generated(capsys: pytest.CaptureFixture[str]) -> Generated:
    def run(folder: Path, *options: str) -> str:
        arguments = ["generate", str(folder), PROMPT, "--scheme", "float", "--max-new-tokens", str(LENGTH), *options]
        assert main(arguments) == 0
        return capsys.readouterr().out.removesuffix("\n")

    return run


def by_transformers(folder: Path, **options: Any) -> str:
    """What ``generate`` of transformers makes of it, with nothing of the command line between."""
    model, tokenizer = cpumoe.load_model(folder, scheme="float"), load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False, **options)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def sampled(folder: Path, sampling: Sampling) -> str:
    """What the engine makes of it."""
    model, tokenizer = cpumoe.load_model(folder, scheme="float"), load_tokenizer(folder)
    with Session(model, tokenizer, sampling) as session:
        return session.answer(tokenizer.encode(PROMPT), LENGTH, lambda piece: None).text


def test_the_model_says_how(greedy_model: Path, sampling_model: Path, generated: Generated) -> None:
    assert generated(greedy_model) == by_transformers(greedy_model) == generated(greedy_model, "--greedy")
    own = Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3)
    for seed in (5, 6):
        assert generated(sampling_model, "--seed", str(seed)) == sampled(sampling_model, replace(own, seed=seed))
    assert generated(sampling_model, "--seed", "5") != generated(sampling_model, "--seed", "6")


def test_the_user_says_how(greedy_model: Path, sampling_model: Path, generated: Generated) -> None:
    # The penalty of its configuration is no sampling and stays.
    greedy = by_transformers(sampling_model)
    assert generated(sampling_model, "--greedy") == greedy == generated(sampling_model, "--temperature", "0")
    assert greedy != by_transformers(greedy_model)
    own = Sampling(temperature=0.8, top_k=3, top_p=0.9, repetition_penalty=1.3, seed=5)
    assert generated(sampling_model, "--top-k", "3", "--seed", "5") == sampled(sampling_model, own)
    options = ["--temperature", "1.5", "--top-p", "0.7", "--min-p", "0.01", "--top-k", "9", "--seed", "7"]
    settings = Sampling(temperature=1.5, top_p=0.7, min_p=0.01, top_k=9, seed=7)
    assert generated(greedy_model, *options) == sampled(greedy_model, settings)
    warm = sampled(greedy_model, Sampling(temperature=1.0, top_k=50, seed=7))
    assert generated(greedy_model, "--temperature", "1", "--seed", "7") == warm
    # Only the likeliest token is as likely as the likeliest.
    assert generated(greedy_model, "--temperature", "1", "--min-p", "1") == generated(greedy_model)


def test_a_seed_is_of_the_first_answer(greedy_model: Path) -> None:
    """Answers to the same question differ, and a session with the same seed repeats all of them."""
    model, tokenizer = cpumoe.load_model(greedy_model, scheme="float"), load_tokenizer(greedy_model)
    answers = []
    for _ in range(2):
        with Session(model, tokenizer, Sampling(temperature=1.0, seed=2**64 - 1)) as session:
            answers.append([session.answer([5, 6], 8, lambda piece: None).tokens for _ in range(3)])
    assert answers[0] == answers[1] and len(set(map(tuple, answers[0]))) == 3


def test_a_configuration_that_cannot_be_used(
    greedy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], generated: Generated
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(greedy_model, folder)
    path = folder / "generation_config.json"
    for content, message in (
        ('{"num_beams": 4}', "num_beams is 4; 1 is accepted"),
        ("{", "cannot be used"),
        ('{"temperature": "hot", "do_sample": true}', "temperature is 'hot'; a number is accepted"),
    ):
        path.write_text(content)
        assert main(["generate", str(folder), PROMPT, "--scheme", "float"]) == 2
        told = capsys.readouterr().err
        assert f"{path}" in told and message in told and told.count("\n") == 1
    path.unlink()
    assert generated(folder) == generated(greedy_model)


def test_stop(greedy_model: Path, generated: Generated, capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(greedy_model)
    middle = text[len(text) // 2 :][:3]
    before = text.partition(middle)[0]
    assert before and generated(greedy_model, "--stop", middle) == before
    assert generated(greedy_model, "--stop", middle, "--no-stream") == before
    assert generated(greedy_model, "--stop", "no such text", "--stop", middle) == before
    assert generated(greedy_model, "--stop", text + "more") == text  # held back to the end, and then shown
    facts = json.loads(generated(greedy_model, "--stop", middle, "--json"))
    assert (facts["text"], facts["finish"]) == (before, "stop") and facts["generated_tokens"] < LENGTH


def test_stop_strings_of_the_model(greedy_model: Path, tmp_path: Path, generated: Generated) -> None:
    text = generated(greedy_model)
    folder = tmp_path / "model"
    shutil.copytree(greedy_model, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"stop_strings": [text[6:9]]}))
    assert generated(folder) == text.partition(text[6:9])[0]


def test_an_answer_goes_on_behind_a_stop(greedy_model: Path) -> None:
    """What was read beyond the stop is no part of the next prompt, and the cache knows that."""
    model, tokenizer = cpumoe.load_model(greedy_model, scheme="float"), load_tokenizer(greedy_model)
    prompt = tokenizer.encode(PROMPT)

    def session(*stops: str) -> Session:
        return Session(model, tokenizer, Sampling(), stops)

    with session() as whole:
        text = whole.answer(prompt, LENGTH, lambda piece: None).text
    with session(text[8:10]) as stopped, session(text[8:10]) as other:
        answer = stopped.answer(prompt, LENGTH, lambda piece: None)
        following = [*prompt, *answer.tokens[:-1], 40, 41]
        fresh = other.answer(following, 8, lambda piece: None)
        again = stopped.answer(following, 8, lambda piece: None)
        assert again.tokens == fresh.tokens and again.prefilled < fresh.prefilled


SHORT = st.text(alphabet="ab<", max_size=12)


@given(st.lists(SHORT, max_size=8), st.lists(SHORT.filter(bool), max_size=3))
def test_the_first_complete_stop_ends_the_text(pieces: list[str], stops: list[str]) -> None:
    stop = StopStrings(StopAutomaton(stops))
    shown = [stop.add(piece) for piece in pieces]
    shown.append(stop.rest())
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    assert "".join(shown) == (text[: min(ends)[1]] if ends else text)
    assert stop.found == bool(ends)


@given(st.text(alphabet="ab<", max_size=30), st.lists(SHORT.filter(bool), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    stop = StopStrings(StopAutomaton(stops))
    shown = ""
    for index, character in enumerate(text):
        shown += stop.add(character)
        if stop.found:
            return
        held = text[len(shown) : index + 1]
        assert not held or any(s.startswith(held) for s in stops)


@pytest.mark.full
def test_standard_input(
    greedy_model: Path,
    tmp_path: Path,
    generated: Generated,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a shell connects it: ``cpumoe generate MODEL < prompt.txt``; and ``-``."""
    expected = generated(greedy_model)
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    options = ["--scheme", "float", "--max-new-tokens", str(LENGTH)]
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", str(greedy_model), *options],
        input=PROMPT.encode(),
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout.decode()) == (0, expected + "\n"), done.stderr

    def with_standard_input(text: str, *arguments: str) -> str:
        (tmp_path / "text.txt").write_text(text)
        with (tmp_path / "text.txt").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(list(arguments)) == 0
        return capsys.readouterr().out

    assert with_standard_input(PROMPT, "generate", str(greedy_model), "-", *options) == expected + "\n"
    text = "The experts that a token does not choose cost it nothing. " * 3
    evaluate = ["eval", str(greedy_model), "--scheme", "float", "--json", "--text"]
    told = [json.loads(with_standard_input(text, *evaluate, file)) for file in ("-", str(tmp_path / "text.txt"))]
    assert told[0]["nats"] == told[1]["nats"] and told[0]["text"] == "-"


@pytest.mark.parametrize("content", [b"", b"caf\xe9"])
def test_standard_input_that_is_refused(
    content: bytes, greedy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (tmp_path / "prompt").write_bytes(content)
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", str(greedy_model), "--scheme", "float"]) == 2
    expected = "is not UTF-8: unexpected end of data at byte 3" if content else "is empty; there is nothing to continue"
    assert f"standard input {expected}" in capsys.readouterr().err
