"""Models by their ids on the hub: real processes, the real client, and a hub on 127.0.0.1."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import COMMIT, OTHER_COMMIT, Hub, hub
from hypothesis import given
from hypothesis import strategies as st
from sampling import first_of
from tiny_models import write_tiny_model

pytest.importorskip("transformers")

import cpumoe
from cpumoe.checkpoints.hub import NotDownloaded, find_model, is_model_id
from cpumoe.cli import main

ID = "tiny-owner/Tiny-MoE.v1"
PICKLES = "tiny-owner/pickles"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two files, as models of the hub are, with what must not be downloaded beside it."""
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for unwanted in (
        "modeling_tiny.py",
        "pytorch_model.bin",
        "training_args.pt",
        "README.md",
        "consolidated.safetensors",
    ):
        (folder / unwanted).write_bytes(b"not wanted")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"not wanted")
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    pickles = tmp_path_factory.mktemp("pickles")
    (pickles / "config.json").write_text("{}")
    (pickles / "pytorch_model.bin").write_bytes(b"pickle")
    with hub({ID: model, PICKLES: pickles}) as running:
        yield running


def command(
    *arguments: str, home: Path, endpoint: str = "http://127.0.0.1:9", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    hub_settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    program = "import sys; from cpumoe_command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env={**kept, **hub_settings, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def downloaded(model: Path, served: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of the hub's cache that ``inspect --download`` has filled, and nothing of which will change."""
    home = tmp_path_factory.mktemp("home")
    served.served.clear()
    done = command("inspect", ID, "--download", home=home, endpoint=served.url)
    assert done.returncode == 0, done.stderr
    assert "it would load" in done.stdout and done.stderr == ""
    wanted = {path.name for path in model.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt")}
    assert set(served.served) == wanted - {"consolidated.safetensors"} and len(served.served) == len(wanted) - 1
    return home


def snapshot(home: Path) -> Path:
    return home / "hub" / f"models--{ID.replace('/', '--')}" / "snapshots" / COMMIT


def test_downloads_when_asked_and_only_what_is_needed(downloaded: Path) -> None:
    names = {path.name for path in snapshot(downloaded).iterdir()}
    assert {*SHARDS, "config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert not any(name.endswith((".py", ".bin", ".pt")) for name in names)


@pytest.mark.full
@pytest.mark.parametrize("download", first_of([[], ["--download"]], 1))
def test_what_is_in_the_cache_needs_no_network(download: list[str], downloaded: Path) -> None:
    """The endpoint is one that nobody listens at."""
    done = command("generate", ID, "The", "--scheme", "float", "--max-new-tokens", "2", *download, home=downloaded)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Sets the hub's cache for this process, which has read the environment long ago."""
    from huggingface_hub import constants

    return lambda home: monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))


Cache = Callable[[Path], None]


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", ID, "--text", "{text}", "--scheme", "w4a8-g32", "--against", ID],
        ["quantize", ID, "{out}", "--scheme", "w4a8-g32", "--linears", "float"],
        ["check", ID, "--scheme", "w4a8-g32"],
    ],
)
def test_every_command_takes_ids(arguments: list[str], downloaded: Path, cache: Cache, tmp_path: Path) -> None:
    cache(downloaded)
    text = tmp_path / "text.txt"
    text.write_text("The experts that a token does not choose cost it nothing.")
    assert main([argument.format(text=text, out=tmp_path / "out") for argument in arguments]) == 0


@pytest.mark.full
def test_the_cache_is_where_the_environment_says(downloaded: Path, tmp_path: Path) -> None:
    done = command("inspect", ID, home=tmp_path, HF_HUB_CACHE=str(downloaded / "hub"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", ID, "x"],
        ["chat", ID],
        ["serve", ID],
        ["inspect", ID],
        ["check", ID],
        ["explain", ID],
        ["quantize", ID, "x"],
        ["eval", ID, "--text", __file__],
        ["eval", "{folder}", "--against", ID, "--text", __file__],
    ],
)
def test_a_model_that_is_not_there(
    arguments: list[str], model: Path, cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache(tmp_path)
    assert main([argument.format(folder=model) for argument in arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err == (
        f"cpumoe {arguments[0]}: {ID}: there is no such folder, and no model of this id in the hub cache "
        f"({tmp_path / 'hub'}); download it with: hf download {ID}, or add --download to this command\n"
    )


@pytest.mark.parametrize("missing", [SHARDS[1], "config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_an_incomplete_cache(
    missing: str, downloaded: Path, cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    shutil.copytree(downloaded, home, symlinks=True)
    (snapshot(home) / missing).unlink()
    cache(home)
    assert main(["inspect", ID]) == 2
    told = capsys.readouterr().err
    assert f"{ID} is not complete in the hub cache ({snapshot(home)}): {missing} missing" in told
    assert f"hf download {ID}, or add --download" in told


@pytest.mark.full
def test_the_rest_is_downloaded(downloaded: Path, served: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(downloaded, home, symlinks=True)
    shard = snapshot(home) / SHARDS[1]
    shard.resolve().unlink()
    shard.unlink()
    served.served.clear()
    done = command("inspect", ID, "--download", home=home, endpoint=served.url)
    assert done.returncode == 0 and served.served == [SHARDS[1]]


@pytest.mark.full
def test_a_folder_of_the_same_name_wins(downloaded: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / ID
    shutil.copytree(model, folder)
    shutil.rmtree(folder / "original")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "of-the-folder"
    (folder / "config.json").write_text(json.dumps(config))
    done = command("inspect", ID, home=downloaded, cwd=tmp_path)
    assert "of-the-folder" in done.stdout + done.stderr
    done = command("inspect", ID, "--download", home=downloaded, cwd=tmp_path)
    assert done.returncode == 2 and f"--download has no effect: {ID} is a folder" in done.stderr


@pytest.mark.full
def test_downloads_that_fail(served: Hub, tmp_path: Path) -> None:
    def told(*arguments: str, endpoint: str = served.url, **environment: str) -> str:
        done = command("inspect", *arguments, "--download", home=tmp_path, endpoint=endpoint, **environment)
        assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
        return done.stderr

    assert f"tiny-owner/other: there is no such model at {served.url}, or it is not public" in told("tiny-owner/other")
    assert f"{PICKLES} has no model.safetensors or model.safetensors.index.json" in told(PICKLES)
    assert f"{ID} cannot be downloaded: HF_HUB_OFFLINE is set; unset it" in told(ID, HF_HUB_OFFLINE="1")
    nobody = "http://127.0.0.1:9"
    assert f"{ID} could not be downloaded from {nobody}" in told(ID, endpoint=nobody)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "/nowhere/at/all",
        "./a/b/c",
        "a/b/c",
        "owner/",
        "owner/na me",
        "owner/..",
        "o--x/y",
        "owner/x.git",
        "é/x",
        "owner/name@",
        "owner/name@../x",
        "owner/name@v1@v2",
        "@v1",
    ],
)
def test_what_is_neither_a_folder_nor_an_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cpumoe.CheckpointError, match="there is no such folder; a checkpoint folder, or the id"):
        find_model(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(cpumoe.CheckpointError, match="file is a file; a checkpoint folder"):
        find_model("file")


@given(st.text(alphabet="aZ0._-/é \n", max_size=12))
def test_ids_are_those_of_the_hub(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if is_model_id(name):
        validate_repo_id(name)  # raises where the hub would not take it
        assert name.count("/") == 1
    elif name.count("/") == 1 and not set(name) & set("é \n") and name[0].isalnum():
        owner, repository = name.split("/")
        if repository[:1].isalnum() and owner[-1].isalnum() and repository[-1].isalnum():
            with pytest.raises(HFValidationError):
                validate_repo_id(name)


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3"])
def test_a_revision_behind_an_id(revision: str, downloaded: Path, served: Hub, tmp_path: Path) -> None:
    """The files of the other commit are asked for, and found again without the network."""
    home = tmp_path / "home"
    shutil.copytree(downloaded, home, symlinks=True)
    name = f"{ID}@{revision}"
    done = command("inspect", name, home=home)
    wanted = f"no model of this id and revision {revision!r} in the hub cache ({home / 'hub'})"
    assert done.returncode == 2 and wanted in done.stderr
    assert f"download it with: hf download {ID} --revision {revision}, or add --download" in done.stderr
    done = command("inspect", name, "--download", home=home, endpoint=served.url)
    assert done.returncode == 0, done.stderr
    assert f"snapshots/{OTHER_COMMIT}, 2 files" in done.stdout


def test_a_revision_that_there_is_not(served: Hub, tmp_path: Path) -> None:
    done = command("inspect", f"{ID}@v9", "--download", home=tmp_path, endpoint=served.url)
    assert done.returncode == 2 and f"{ID} has no revision 'v9' at {served.url}" in done.stderr


def test_a_revision_from_python(
    downloaded: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache(downloaded)
    assert find_model(f"{ID}@main") == find_model(f"{ID}@{COMMIT}") == find_model(f"{ID}@main", revision="main")
    assert find_model(f"{ID}@{COMMIT}") == snapshot(downloaded)
    with pytest.raises(ValueError, match="revision='v2' for .*@main, which names the revision 'main'; leave one"):
        find_model(f"{ID}@main", revision="v2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{ID}@main").mkdir(parents=True)
    assert find_model(f"{ID}@main") == Path(f"{ID}@main")  # a folder of the same name wins
    assert sum(1 for _ in cpumoe.load_model(f"{ID}@{COMMIT}", scheme="w4a8-g32").parameters()) > 0


def test_from_python(downloaded: Path, cache: Cache) -> None:
    cache(downloaded)
    assert find_model(ID) == find_model(ID, revision="main") == find_model(ID, revision=COMMIT) == snapshot(downloaded)
    assert find_model(downloaded) == downloaded
    with pytest.raises(ValueError, match="revision='main' for the folder"):
        find_model(downloaded, revision="main")
    with pytest.raises(NotDownloaded, match="hf download owner/name --revision v2$"):
        find_model("owner/name", revision="v2")


def test_load_model_takes_a_revision(downloaded: Path, cache: Cache) -> None:
    cache(downloaded)
    with pytest.raises(ValueError, match="revision='v2' for .*@main, which names the revision 'main'; leave one"):
        cpumoe.load_model(f"{ID}@main", revision="v2")
    with pytest.raises(ValueError, match="revision='zzz' for the folder"):
        cpumoe.load_model(snapshot(downloaded), revision="zzz")
    with pytest.raises(NotDownloaded, match=f"hf download {ID} --revision v2$"):
        cpumoe.load_model(ID, revision="v2")
    assert sum(1 for _ in cpumoe.load_model(ID, revision=COMMIT, scheme="w4a8-g32").parameters()) > 0
