"""Models by their names on the Hugging Face hub: from the local cache, and into it when that is asked for.

The cache is that of ``huggingface_hub``, wherever ``HF_HOME`` or ``HF_HUB_CACHE`` put it; what ``hf download`` or
transformers have put there is found, and the other way round.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

from cpumoe.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE, read_json
from cpumoe.checkpoints.named_tensors import listed
from cpumoe.errors import CheckpointError

#: What is downloaded: configuration, safetensors and what tokenizers are made of. Never code and never pickles.
FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken")

#: Copies of the same weights in their makers' own formats (folders such as original/), which can double a download.
COPIES = ("*/*", "consolidated*")

_PATTERNS = {"allow_patterns": list(FILES), "ignore_patterns": list(COPIES)}

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: A branch, a tag or a commit behind an id: ``owner/name@v1.0``, ``owner/name@refs/pr/3``.
_REVISION = re.compile(r"(?P<id>[^@]*)@(?P<revision>[A-Za-z0-9](?!.*\.\.)[\w./+-]*)", re.ASCII)
_SHARD = re.compile(r".*-\d+-of-\d+\.safetensors")


class NotDownloaded(CheckpointError):
    """A model of the hub that is not in the local cache, or not complete; the message ends with how to download it."""


def find_model(name: str | Path, *, download: bool = False, revision: str | None = None) -> Path:
    """The folder of a model.

    Args:
        name: a folder, or the id of a model on the hub such as ``"Qwen/Qwen3-30B-A3B"``, which may end in a revision:
            ``"Qwen/Qwen3-30B-A3B@main"``. A folder of that name wins.
        download: whether a model that is not in the hub cache, or not complete there, is downloaded into it. Without,
            nothing is ever asked of the network.
        revision: branch, tag or commit of an id that does not end in one; ``main`` by default.

    Returns:
        The folder itself, or that of the model's snapshot in the hub cache.

    Raises CheckpointError for what is neither a folder nor an id, NotDownloaded for an id whose files are not all in
    the cache, RuntimeError if a download fails.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} for the folder {folder}; it is for models of the hub")
        return folder
    if folder.exists():
        raise CheckpointError(f"{name} is a file; a checkpoint folder, or the id of a model on the hub, is accepted")
    model_id, found = _with_revision(str(name))
    if not is_model_id(model_id):
        raise CheckpointError(
            f"{name}: there is no such folder; a checkpoint folder, or the id of a model on the hub such as "
            "Qwen/Qwen3-30B-A3B or Qwen/Qwen3-30B-A3B@REVISION, is accepted"
        )
    if found is not None and revision not in (None, found):
        raise ValueError(f"revision={revision!r} for {name}, which names the revision {found!r}; leave one of them out")
    revision = revision or found
    try:
        return _cached(model_id, revision)
    except NotDownloaded:
        if not download:
            raise
    return _download(model_id, revision)


def _with_revision(name: str) -> tuple[str, str | None]:
    """Return the id and the revision of ``owner/name@revision``; None for a name without one."""
    match = _REVISION.fullmatch(name)
    return (name, None) if match is None else (match["id"], match["revision"])


def is_model_id(name: str | Path) -> bool:
    """Whether ``name`` may be the id of a model on the hub: ``owner/name``."""
    text = str(name)
    return bool(_ID.fullmatch(text)) and not re.search(r"--|\.\.|\.git$|[.-](/|$)", text) and len(text) <= 96


def _hub() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise RuntimeError("a model of the hub needs huggingface_hub: pip install 'cpumoe[transformers]'") from None
    return huggingface_hub


def _download_command(name: str, revision: str | None) -> str:
    return f"hf download {name}" + ("" if revision is None else f" --revision {revision}")


def _cached(name: str, revision: str | None) -> Path:
    """The snapshot in the cache, if all of it is there."""
    hub = _hub()
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(hub.snapshot_download(name, revision=revision, local_files_only=True, **_PATTERNS))
        missing = _missing(folder)
    except LocalEntryNotFoundError as problem:
        partial = getattr(problem, "snapshot_path", None)  # some files are there
        if partial is None:
            wanted = "" if revision is None else f" and revision {revision!r}"
            raise NotDownloaded(
                f"{name}: there is no such folder, and no model of this id{wanted} in the hub cache "
                f"({hub.constants.HF_HUB_CACHE}); download it with: {_download_command(name, revision)}"
            ) from None
        folder = Path(partial)
        # The hub's own list knows more than the weights, but only its sentence has it.
        missing = _missing(folder) or re.findall(r"missing \((.*?)\)", str(problem)) or ["some of its files"]
    if missing:
        raise NotDownloaded(
            f"{name} is not complete in the hub cache ({folder}): {listed(missing)} missing; "
            f"download the rest with: {_download_command(name, revision)}"
        )
    return folder


def _missing(folder: Path) -> list[str]:
    """Names of the files that a checkpoint must have and this folder has not."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if (folder / SINGLE_FILE).is_file():
        return missing
    if (folder / INDEX_FILE).is_file():
        named = read_json(folder / INDEX_FILE).get("weight_map")
        shards = set(named.values()) if isinstance(named, dict) else set()  # a damaged index is for those who open it
        return missing + sorted(str(shard) for shard in shards if not (folder / str(shard)).is_file())
    if any(map(_SHARD.fullmatch, (path.name for path in folder.iterdir()))):
        return [*missing, INDEX_FILE]
    return [*missing, f"{SINGLE_FILE} or {INDEX_FILE}"]


def _download(name: str, revision: str | None) -> Path:
    hub = _hub()
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = hub.constants.ENDPOINT
    if hub.constants.HF_HUB_OFFLINE:
        raise RuntimeError(f"{name} cannot be downloaded: HF_HUB_OFFLINE is set; unset it")
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    try:
        folder = Path(hub.snapshot_download(name, revision=revision, **_PATTERNS))
    except GatedRepoError as problem:
        raise RuntimeError(
            f"{name}: its owners let only those download it who have asked at {endpoint}/{name}; then: hf auth login"
        ) from problem
    except RepositoryNotFoundError as problem:
        raise RuntimeError(
            f"{name}: there is no such model at {endpoint}, or it is not public; for one of your own: hf auth login"
        ) from problem
    except RevisionNotFoundError as problem:
        raise RuntimeError(f"{name} has no revision {revision!r} at {endpoint}") from problem
    except Exception as problem:  # the network has many names for its troubles
        raise RuntimeError(f"{name} could not be downloaded from {endpoint}: {_first_line(problem)}") from problem
    if missing := _missing(folder):
        raise CheckpointError(
            f"{name} has no {listed(missing)} at {endpoint}; a checkpoint in safetensors is accepted, and pickles are "
            "never loaded"
        )
    return folder


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]
