"""Turns the sources of the Python standard library, tests included, into the training data of the model.

    python prepare.py --python python3.13 --python python3.12 --python python3.11 --out build/model-data

Steps: collect the ``.py`` files of every interpreter named, leave out generated tables and files that are not meant to
be read, drop duplicates, split by group of sibling modules into train, valid and held-out, train a byte-level BPE
tokenizer on the train part, and write token arrays. The same interpreters give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"

# What is cut apart before BPE, so that no token crosses these borders:
_PIECES = "|".join(
    [
        r"[ \t]*\n(?:[ \t]*\n)*",  # line ends, blank lines included
        r"(?<=\n)[ \t]+",  # all of the indentation in one piece, so that a prompt may end behind it
        r"[ .]?[\p{L}_]+",  # a word with the space or the dot before it: " def", ".append"
        r"\p{N}{1,3}",
        r" ?(?:(?!\.[\p{L}_])[^\s\p{L}\p{N}_])+",  # punctuation, but leave the dot of ".append" to the word
        r"[ \t]+(?![ \t\S])",
        r"[ \t]+(?=[ \t]\S)",  # alignment inside a line: the last space belongs to the word behind it
        r"\s+",
    ]
)

# Not prose of a programmer: written by a generator, or text that is broken on purpose.
_SKIPPED_NAMES = re.compile(
    r"^(_sysconfigdata.*|_sysconfig_vars.*|topics|_casefix|_opcode_metadata|stringprep|bad_?coding.*|badsyntax.*|bad_getattr.*|"
    r"nokia|entities|levenshtein_examples|mime\.types)\.py$"
)
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "cjkencodings", "crashers"}
)
_SKIPPED_PATHS = ("lib2to3/tests/data/", "test/test_lib2to3/data/", "config-", "test/tokenizedata/bad")

_SHINGLE = 4  # lines; shorter ones make every file with an import block look like a copy
_LARGEST_SHARE_SEEN = 0.5  # of the shingles of a file that may have been seen before
_LARGEST_SHARE_LEAKED = 0.02  # of the shingles of a held-out group that may occur in the rest of the corpus


@dataclass(frozen=True)
class Source:
    """One file: ``path`` is relative to the standard library, ``python`` the version it comes from."""

    path: str
    python: str
    text: str

    @property
    def size(self) -> int:
        return len(self.text.encode())

    @property
    def group(self) -> str:
        """The module that the file belongs to: ``json/decoder.py`` and ``test/test_json/test_dump.py`` are ``json``.

        Groups are never divided between train and held-out, since a module and its tests share their text. The name
        does not always tell; :func:`_split` therefore also looks at the text.
        """
        parts = Path(self.path).with_suffix("").parts
        name = parts[1] if parts[0] == "test" and len(parts) > 1 else parts[0]
        if parts[0] in ("lib2to3", "distutils", "idlelib", "tkinter", "unittest"):  # their tests are inside them
            name = parts[0]
        name = re.sub(r"^_*(test_)?_*(py(?=[a-z]{3}))?_*", "", name.lower())
        name = re.sub(r"_?(tests?|tester|helper|util|support|_common)$", "", name).strip("_")
        return _ALIASES.get(name, name) or "test"


# Modules whose text is spread over names that do not show it.
_ALIASES = {
    "dict_version": "dict",
    "userdict": "dict",
    "mapping": "dict",
    "list": "seq",
    "userlist": "seq",
    "tuple": "seq",
    "string": "str",
    "userstring": "str",
    "bytes": "str",
    "unicode": "str",
    "io": "file",
    "fileio": "file",
    "memoryio": "file",
    "bufio": "file",
    "strptime": "datetime",
    "time": "datetime",
    "calendar": "datetime",
    "sre_compile": "re",
    "sre_parse": "re",
    "sre_constants": "re",
    "nturl2path": "urllib",
    "urllib2": "urllib",
    "urlparse": "urllib",
    "httplib": "http",
    "httpservers": "http",
    "ntpath": "path",
    "posixpath": "path",
    "genericpath": "path",
    "pathlib": "path",
    "macpath": "path",
}


def main() -> None:
    args = _arguments()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)

    collected = [source for python in args.python or [sys.executable] for source in _collect(python)]
    readable = [source for source in collected if not _is_table(source.text)]
    kept = _drop_duplicates(readable)
    train, valid, heldout = _split(kept, args.valid_kb * 1000, args.heldout_kb * 1000, args.seed)

    tokenizer = _train_tokenizer([source.text for source in train], args.vocabulary)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_tokenizer_config(out / "tokenizer_config.json")

    summary: dict[str, object] = {
        "licence": "Python Software Foundation License Version 2 (PSF-2.0); a few modules carry further notices",
        "pythons": sorted({source.python for source in kept}, reverse=True),
        "files_collected": len(collected),
        "bytes_collected": sum(source.size for source in collected),
        "files_without_tables": len(readable),
        "bytes_without_tables": sum(source.size for source in readable),
        "files_without_duplicates": len(kept),
        "bytes_without_duplicates": sum(source.size for source in kept),
        "vocabulary": tokenizer.get_vocab_size(),
        "seed": args.seed,
    }
    for name, part in (("train", train), ("valid", valid), ("heldout", heldout)):
        ids = _encode(tokenizer, part, args.seed)
        ids.tofile(out / f"{name}.bin")
        size = sum(source.size for source in part)
        summary[name] = {
            "files": len(part),
            "bytes": size,
            "tokens": len(ids),
            "bytes_per_token": round(size / len(ids), 4),
            "shingles_in_train": round(_share_seen(part, train), 5) if name != "train" else None,
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        }
        if name != "train":
            summary[f"{name}_files"] = [f"{source.path} ({source.python})" for source in part]
    text = "\n".join(source.text for source in heldout)
    (out / "heldout.txt").write_text(text, encoding="utf-8", newline="\n")
    summary["heldout_txt_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    summary["train_files_sha256"] = hashlib.sha256(
        "\n".join(f"{s.python} {s.path} {hashlib.sha256(s.text.encode()).hexdigest()}" for s in train).encode()
    ).hexdigest()
    (out / "data.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in summary.items() if not key.endswith("_files")}, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python",
        action="append",
        help="interpreter whose standard library is read; repeat it, newest first: of the older ones only what is new "
        "to the newer ones is used (default: this interpreter)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/model-data"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--valid-kb", type=int, default=600, help="size of the part that picks the best weights")
    parser.add_argument(
        "--heldout-kb", type=int, default=150, help="size of the part that is measured but chooses nothing"
    )
    # With 6 the share of tests is the same in all parts, about 70 % of the bytes.
    parser.add_argument("--seed", type=int, default=6)
    return parser.parse_args()


def _collect(python: str) -> Iterator[Source]:
    """The readable sources of one interpreter's standard library, in the order of their paths."""
    question = "import sys, sysconfig; print(sys.version.split()[0]); print(sysconfig.get_path('stdlib'))"
    version, folder = subprocess.run(
        [python, "-c", question], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    root = Path(folder)
    if not (root / "test" / "test_grammar.py").exists():
        raise SystemExit(
            f"{python} has no test package in {root}, half of the data: install it (Debian: libpython3.x-testsuite; "
            "Fedora: python3-test) or use an interpreter built from source (pyenv, python.org), which has it"
        )
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) or _SKIPPED_NAMES.match(path.name):
            continue
        if any(part in relative for part in _SKIPPED_PATHS) or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # tests of source encodings
        text = text.replace("\r\n", "\n").removeprefix("\ufeff")
        if "\0" in text or "\r" in text or len(text) < 100:
            continue
        yield Source(relative, version, text)


def _is_table(text: str) -> bool:
    """Whether most of a file is data: code pages, dumps, lists of numbers."""
    rows = [line for line in text.splitlines() if len(line) > 20]
    if not rows:
        return False

    def is_data(line: str) -> bool:
        # Escapes and numbers of any base; a line of code has more letters than that.
        rest = re.sub(r"\\[xuU][0-9a-fA-F]{2,8}|0x[0-9a-fA-F]+|\\[0-7]{1,3}|[\d\W_]", "", line.split("#")[0])
        return len(line) > 200 or len(rest) < 0.2 * len(line.split("#")[0].strip())

    # Long lines count by their length: one line of base64 can be most of a file.
    return sum(len(row) for row in rows if is_data(row)) > 0.4 * sum(map(len, rows))


def _shingles(text: str) -> set[int]:
    """Hashes of every run of lines, without indentation, comments' spacing and lines of punctuation only."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 3]
    runs = ("\n".join(lines[i : i + _SHINGLE]) for i in range(max(1, len(lines) - _SHINGLE + 1)))
    return {int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little") for run in runs}


def _drop_duplicates(sources: Iterable[Source]) -> list[Source]:
    """Keeps a file if at most half of its runs of four lines occur in the files kept before it.

    This finds exact copies, edited copies, and the same file of an older version, without pairwise comparison; unlike
    minhash it is exact, and it also finds a file put together from several others.
    """
    seen: set[int] = set()
    kept = []
    for source in sources:
        shingles = _shingles(source.text)
        if len(shingles & seen) <= _LARGEST_SHARE_SEEN * len(shingles):
            kept.append(source)
            seen |= shingles
    return kept


def _share_seen(part: list[Source], others: list[Source]) -> float:
    """Share of the shingles of ``part`` that occur in ``others`` too."""
    known: set[int] = set().union(*(_shingles(source.text) for source in others))
    ours: set[int] = set().union(*(_shingles(source.text) for source in part))
    return len(ours & known) / max(1, len(ours))


def _split(
    sources: list[Source], valid_bytes: int, heldout_bytes: int, seed: int
) -> tuple[list[Source], list[Source], list[Source]]:
    """Train, valid and held-out, by whole groups of modules, drawn in an order that only the seed decides."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        groups.setdefault(source.group, []).append(source)
    shingles = {name: set().union(*(_shingles(s.text) for s in group)) for name, group in groups.items()}
    owners: dict[int, int] = {}  # shingle -> in how many groups it occurs
    for group_shingles in shingles.values():
        for shingle in group_shingles:
            owners[shingle] = owners.get(shingle, 0) + 1

    def drawn(name: str) -> str:
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    parts: dict[str, list[Source]] = {"heldout": [], "valid": []}
    for part, limit, smallest, largest in (
        ("heldout", heldout_bytes, heldout_bytes // 30, heldout_bytes // 4),
        ("valid", valid_bytes, 4_000, valid_bytes // 6),
    ):
        for name in sorted(groups, key=drawn):
            size = sum(source.size for source in groups[name])
            room = limit - sum(source.size for source in parts[part])
            shared = sum(owners[s] > 1 for s in shingles[name]) / len(shingles[name])
            if smallest <= size <= min(largest, room) and shared <= _LARGEST_SHARE_LEAKED:
                parts[part].extend(groups.pop(name))
    train = [source for name in sorted(groups) for source in groups[name]]
    return train, parts["valid"], parts["heldout"]


def _train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any bytes can be written, seen or not
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def _write_tokenizer_config(path: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _encode(tokenizer: Tokenizer, part: list[Source], seed: int) -> np.ndarray:
    """``<|begin|>`` file ``<|end|>`` of all files, in an order that mixes the groups."""
    order = sorted(part, key=lambda source: hashlib.sha256(f"{seed} {source.python} {source.path}".encode()).digest())
    end = tokenizer.token_to_id(END)
    files = [[*encoding.ids, end] for encoding in tokenizer.encode_batch([source.text for source in order])]
    return np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in files])


if __name__ == "__main__":
    main()
