"""Files as an attacker or a bad disk leaves them: what is not whole is refused with a sentence, never misread."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from cpumoe import CheckpointError, UnsupportedScheme
from cpumoe.checkpoints.checkpoint import INDEX_FILE, LAYER, SINGLE_FILE, Checkpoint, read_json
from cpumoe.checkpoints.tensor_file import ALIGNMENT, DTYPES, TensorFile, TensorFileWriter
from cpumoe.errors import printable
from cpumoe.integrations.transformers.facade import describe
from cpumoe.integrations.transformers.layout.expert_modules import expert_modules
from cpumoe.integrations.transformers.layout.model_classes import config_of, empty_model

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.int8),
    "c": torch.ones(2, 2, dtype=torch.bfloat16),
}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[object], start: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def valid(tmp_path):
    path = tmp_path / "valid.safetensors"
    save_file(TENSORS, path)
    return path


# ---- reading one file ----------------------------------------------------------------------------------------------


def test_tensors_are_read_as_safetensors_reads_them(valid):
    with TensorFile(valid) as file:
        assert set(file.tensors) == set(TENSORS)
        for name, tensor in load_file(valid).items():
            got = file.read(name)
            assert got.dtype == tensor.dtype and torch.equal(got, tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_is_read(tmp_path, dtype):
    tensor = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        got = file.read("x")
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_part_of_a_tensor_is_read_in_place(valid):
    rows = torch.empty(2, 4)
    with TensorFile(valid) as file:
        file.read_into("a", rows, first_byte=16)
        assert torch.equal(rows, TENSORS["a"][1:])
        with pytest.raises(ValueError, match="a: 32 bytes from 32 on do not lie in its 48"):
            file.read_into("a", rows, first_byte=32)
        with pytest.raises(ValueError, match="a:"):
            file.read_into("a", torch.empty(4, 2).T)


def test_a_file_cut_at_any_length_is_refused(valid):
    whole = valid.read_bytes()
    for length in range(len(whole)):
        valid.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="valid.safetensors cannot be read as a safetensors file"):
            TensorFile(valid)


def test_a_file_with_bytes_behind_its_end_is_refused(valid):
    valid.write_bytes(valid.read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        TensorFile(valid)


LIES = {
    "offsets beyond the file": file_bytes({"x": entry("F32", [2], 0, 8)}, b"\0" * 4),
    "offsets far beyond the file": file_bytes({"x": entry("F32", [2], 2**62, 2**62 + 8)}, b"\0" * 8),
    "offsets that overlap": file_bytes({"x": entry("I8", [4], 0, 4), "y": entry("I8", [4], 2, 6)}, b"\0" * 6),
    "a hole between tensors": file_bytes({"x": entry("I8", [2], 0, 2), "y": entry("I8", [2], 4, 6)}, b"\0" * 6),
    "an end before the start": file_bytes({"x": entry("I8", [4], 4, 0)}, b"\0" * 4),
    "negative offsets": file_bytes({"x": entry("I8", [4], -4, 0)}, b"\0" * 4),
    "a negative size": file_bytes({"x": entry("I8", [-4], 0, 4)}, b"\0" * 4),
    "a size that is not a number": file_bytes({"x": entry("I8", ["4"], 0, 4)}, b"\0" * 4),
    "a size that overflows": file_bytes({"x": entry("F64", [2**40, 2**40], 0, 8)}, b"\0" * 8),
    "a shape that needs more bytes": file_bytes({"x": entry("F32", [4], 0, 4)}, b"\0" * 4),
    "a shape that needs fewer bytes": file_bytes({"x": entry("I8", [1], 0, 4)}, b"\0" * 4),
    "an unknown dtype": file_bytes({"x": entry("F12", [4], 0, 4)}, b"\0" * 4),
    "no dtype": file_bytes({"x": {"shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4),
    "three offsets": file_bytes({"x": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4, 8]}}, b"\0" * 4),
    "a tensor that is a number": file_bytes({"x": 5}),
    "a header that is a list": file_bytes([1, 2]),
    "a header that is not JSON": file_bytes(b"{'x': 1}"),
    "a header that is not UTF-8": file_bytes(b'{"\xff\xfe": 1}'),
    "a header that is nested deeply": file_bytes(b"[" * 100_000),
    "an empty header": file_bytes(b""),
    "a header longer than the file": file_bytes({}, length=2**20),
    "a header of 2**63 bytes": file_bytes({}, length=2**63),
    "a header of 2**64 - 1 bytes": file_bytes({}, length=2**64 - 1),
    "metadata that is not text": file_bytes({"__metadata__": {"a": 1}, "x": entry("I8", [1], 0, 1)}, b"\0"),
    "nothing": b"",
    "a pickle": pickle.dumps({"x": [1, 2, 3]}),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES)
def test_lying_headers_are_refused(tmp_path, content):
    path = tmp_path / "lie.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="lie.safetensors cannot be read as a safetensors file"):
        TensorFile(path)


def test_a_name_given_twice_never_reads_outside_its_bytes(tmp_path):
    """safetensors keeps one of two equal keys; whatever is kept must be what was checked."""
    path = tmp_path / "twice.safetensors"
    text = b'{"x":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"x":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}'
    path.write_bytes(file_bytes(text, b"\1\2\3\4"))
    try:
        file = TensorFile(path)
    except CheckpointError:
        return
    with file:
        assert file.read("x").tolist() == load_file(path)["x"].tolist()


def test_missing_metadata_is_an_empty_mapping(tmp_path):
    path = tmp_path / "x.safetensors"
    for header in ({}, {"__metadata__": None}, {"__metadata__": {}}):
        path.write_bytes(file_bytes(header | {"x": entry("I8", [1], 0, 1)}, b"\7"))
        with TensorFile(path) as file:
            assert file.metadata == {} and file.read("x").item() == 7


def test_a_dtype_that_torch_code_does_not_take_is_refused_by_name(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes({"x": entry("U64", [1], 0, 8)}, b"\0" * 8))
    with TensorFile(path) as file, pytest.raises(CheckpointError, match="x is U64; accepted are F64, F32"):
        file.read("x")


def test_a_file_cut_while_open_is_noticed(valid):
    with TensorFile(valid) as file:
        size = valid.stat().st_size
        os.truncate(valid, size - 10)
        with pytest.raises(CheckpointError, match="ended while . was read; was it cut while being used"):
            for name in TENSORS:
                file.read(name)


@pytest.mark.parametrize("kind", ["folder", "missing", "not readable as a file"])
def test_what_is_not_a_file_is_refused(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "not readable as a file":
        path.symlink_to(path)
    with pytest.raises(CheckpointError, match="x.safetensors cannot be read"):
        TensorFile(path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # counting is all that is wanted


def test_refused_files_are_closed(valid, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.link(valid, tmp_path / "a.safetensors")
    os.link(valid, tmp_path / "b.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    before = open_files()
    for _ in range(20):
        with pytest.raises(CheckpointError, match="is in a.safetensors and in b.safetensors"):
            Checkpoint.open(tmp_path)
    assert open_files() <= before + 1


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_bytes_does_more_than_an_error(valid, data):
    whole = bytearray(valid.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        # most of the changes in the header, where there is something to misunderstand
        position = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1)))
        whole[position] = data.draw(st.integers(0, 255))
    path = valid.with_name("fuzzed.safetensors")
    path.write_bytes(whole)
    try:
        with TensorFile(path) as file:
            for name, info in file.tensors.items():
                tensor = file.read(name)
                assert tuple(tensor.shape) == info.shape and tensor.numel() * tensor.element_size() == info.bytes
    except CheckpointError:
        pass


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, -1, 2**32, 2**64 - 1, 2**64, True, 4.0, "4", None])
SIZES = st.lists(NUMBERS, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["I8", "F4", "F6_E2M3", "F8_E8M0", "BF16", "C64", "F12", "i8", 1]),
        "shape": st.lists(st.integers(0, 4), max_size=3) | SIZES,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted) | SIZES,
    },
    optional={"more": st.just([1.5])},
)
METADATA = st.sampled_from([None, {}, {"format": "pt"}, {"format": 1}, [], "pt"])


@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "\u00e9", ""]), ENTRIES, max_size=2),
    metadata=METADATA,
    size=st.integers(0, 16),
    padding=st.sampled_from(["", "  ", "x"]),
)
def test_headers_are_accepted_as_safetensors_accepts_them(tmp_path, header, metadata, size, padding):
    fields = header if metadata is None else {"__metadata__": metadata} | header
    path = tmp_path / "any.safetensors"
    path.write_bytes(file_bytes((json.dumps(fields) + padding).encode(), b"\0" * size))
    assert is_accepted(lambda: TensorFile(path)) == is_accepted(lambda: safe_open(path, framework="np"))


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 3)), max_size=4), cut=st.integers(-2, 1)
)
def test_whole_files_are_accepted_as_safetensors_accepts_them(tmp_path_factory, sizes, cut):
    """Tensors that follow one another, whose last may end before or behind the end of the file."""
    fields, end = {}, 0
    for index, (dtype, count) in enumerate(sizes):
        last = end + count * DTYPES[dtype].itemsize
        fields[f"t{index}"], end = entry(dtype, [count, 1], end, last), last
    path = tmp_path_factory.mktemp("whole") / "any.safetensors"
    path.write_bytes(file_bytes(fields, b"\0" * max(0, end + cut)))
    assert is_accepted(lambda: TensorFile(path)) == is_accepted(lambda: safe_open(path, framework="np"))


def is_accepted(opened: Callable[[], object]) -> bool:
    try:
        opened().__enter__()
    except (CheckpointError, SafetensorError):
        return False
    return True


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (file_bytes({"x": entry("I8", [8], 0, 8)}, b"\0" * 5), "and its header announces [0-9]+; download it again"),
        (
            file_bytes({"x": entry("I8", [8], 0, 8)})[:30],
            "it has 30 bytes, and its header alone [0-9]+; download it again",
        ),
        (b"", "it has 0 bytes, and its header alone has more; download it again"),
        (file_bytes({"x": entry("I8", [8], 0, 8)}, b"\0" * 9), "1 more than its header announces; download it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8\n",
            "a pointer of Git LFS .*: git lfs pull",
        ),
        (
            file_bytes({"x": entry("I8", [2**63] * 100_000, 0, 8)}, b"\0" * 8),
            "which does not fit its data_offsets 0 and 8",
        ),
    ],
)
def test_files_that_are_not_whole_say_what_to_do(tmp_path, content, said):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"x.safetensors cannot be read as a safetensors file: .*{said}"):
        TensorFile(tmp_path / "x.safetensors")


# ---- writing -------------------------------------------------------------------------------------------------------


def specs(tensors):
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(path: Path, tensors, metadata=None):
    with TensorFileWriter(path, specs(tensors), metadata or {}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def test_what_is_written_is_read_by_safetensors(tmp_path):
    tensors = {
        **TENSORS,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "strided": torch.arange(6).view(2, 3).T,
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "out.safetensors"
    write(path, tensors, {"made by": "a test"})
    got = load_file(path)
    assert list(got) == sorted(tensors) or set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name].float(), tensor.float())
    with TensorFile(path) as file:
        assert file.metadata == {"made by": "a test"}
    assert os.listdir(tmp_path) == ["out.safetensors"]  # noqa: PTH208


@given(names=st.lists(st.text(max_size=70), max_size=8, unique=True))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_data_starts_at_a_multiple_of_64_whatever_the_names(tmp_path, names):
    names = [name for name in names if name != "__metadata__"]
    path = tmp_path / "out.safetensors"
    try:
        write(path, {name: torch.full((64,), 7, dtype=torch.uint8) for name in names})
    except UnicodeEncodeError:  # half of a surrogate pair is no text
        return
    with TensorFile(path) as file:
        assert set(file.tensors) == set(names)
        assert all(info.start % ALIGNMENT == 0 for info in file.tensors.values())


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"what was there before")
    with TensorFileWriter(path, specs(TENSORS), {}) as writer:
        for name, tensor in TENSORS.items():
            assert path.read_bytes() == b"what was there before"
            writer.write(name, tensor)
    assert set(load_file(path)) == set(TENSORS)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_exception_leaves_nothing_behind(tmp_path, error):
    with pytest.raises(error), TensorFileWriter(tmp_path / "out.safetensors", specs(TENSORS), {}) as writer:
        writer.write("a", TENSORS["a"])
        raise error
    assert not list(tmp_path.iterdir())


def test_tensors_in_another_order_are_refused(tmp_path):
    path = tmp_path / "out.safetensors"
    with (
        pytest.raises(ValueError, match=r"b \[5\] was not announced as the next tensor \(a was\)"),
        TensorFileWriter(path, specs(TENSORS), {}) as writer,
    ):
        writer.write("b", TENSORS["b"])
    with (
        pytest.raises(ValueError, match=r"a \[2\] was not announced"),
        TensorFileWriter(path, specs(TENSORS), {}) as writer,
    ):
        writer.write("a", torch.ones(2))
    with (
        pytest.raises(ValueError, match="c was announced but not written"),
        TensorFileWriter(path, specs(TENSORS), {}) as writer,
    ):
        writer.write("a", TENSORS["a"])
        writer.write("b", TENSORS["b"])
    with (
        pytest.raises(ValueError, match="more was not announced|more .* was not announced"),
        TensorFileWriter(path, {}, {}) as writer,
    ):
        writer.write("more", TENSORS["a"])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def full_disk():
    """Files may have 200 kB: writes fail in the places where they would on a full disk, with EFBIG for ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("tensors", "rows"), [(1, 4 << 20), (400, 1 << 14), (4000, 100)], ids=["one large", "many", "a large header"]
)
def test_a_full_disk_leaves_nothing_behind(tmp_path, full_disk, tensors, rows):
    with pytest.raises(OSError, match="File too large: .*out.safetensors") as problem:
        write(tmp_path / "out.safetensors", {f"{n:0100}": torch.zeros(rows, dtype=torch.uint8) for n in range(tensors)})
    assert problem.value.errno == errno.EFBIG and not list(tmp_path.iterdir())


# ---- folders -------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map=None) -> Path:
    (folder / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if weight_map is not None:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_one_set_of_tensors(tmp_path):
    write_folder(
        tmp_path,
        {"1.safetensors": {"a": torch.ones(2)}, "2.safetensors": {"b": torch.zeros(3)}},
        {"a": "1.safetensors", "b": "2.safetensors"},
    )
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == {"a", "b"} and "a" in checkpoint and "c" not in checkpoint
        assert torch.equal(checkpoint.read("b"), torch.zeros(3))


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path):
    """save_pretrained leaves an old index behind when a model that was sharded fits one file."""
    write_folder(tmp_path, {SINGLE_FILE: {"a": torch.ones(2)}}, {"b": "gone.safetensors"})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names) == {"a"}


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "sub/x.safetensors", "/etc/passwd", "", ".", "..", "./x.safetensors", "x.safetensors/"],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path, name):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1)}, folder / "sub" / "x.safetensors")
    write_folder(folder, {"x.safetensors": {"a": torch.ones(1)}}, {"a": name})
    with pytest.raises(CheckpointError, match="files of the folder itself are accepted"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["gone.safetensors", "x" * 5000, "nul\0byte"])
def test_an_index_that_names_missing_files_is_refused_with_their_names(tmp_path, name):
    write_folder(tmp_path, {"1.safetensors": {"a": torch.ones(1)}}, {"a": "1.safetensors", "b": name})
    with pytest.raises(CheckpointError, match="lacks .*which model.safetensors.index.json names") as refusal:
        Checkpoint.open(tmp_path)
    assert printable(name) in str(refusal.value)


def test_an_index_that_names_missing_tensors_is_refused_with_their_names(tmp_path):
    shards = {"1.safetensors": {"a": torch.ones(1)}, "2.safetensors": {"b": torch.ones(1)}}
    write_folder(tmp_path, shards, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
    with pytest.raises(CheckpointError, match="not in the files it names: b, c"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused_with_its_name(tmp_path):
    shards = {"1.safetensors": {"a": torch.ones(1)}, "2.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}}
    write_folder(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(CheckpointError, match="a is in 1.safetensors and in 2.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], "x", 5, {"a": 5}, {"a": None}, {"a": ["1.safetensors"]}])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    write_folder(tmp_path, {"1.safetensors": {"a": torch.ones(1)}})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="has no weight_map from tensor names to file names"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"[1, 2]", "holds a list; a JSON object is accepted"),
        (b"null", "holds a NoneType"),
        (b'"text"', "holds a str"),
        (b"{", "cannot be read as JSON"),
        (b"", "cannot be read as JSON"),
        (b'{"a": "\xff"}', "cannot be read as JSON"),
        (b"[" * 200_000, "cannot be read as JSON"),
        (b"\xff\xfe{\x00}\x00", "cannot be read as JSON"),
    ],
)
def test_json_that_is_not_what_it_says_is_refused(tmp_path, content, reason):
    write_folder(tmp_path, {SINGLE_FILE: {"a": torch.ones(1)}})
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json {reason}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": {"size": ' + b"9" * 5000 + b"}}", "size is an integer of 5000 digits; up to 40 are accepted"),
        (b'{"sizes": [[1, ' + b"9" * 50 + b"]]}", "sizes is an integer of 50 digits"),
        (b'{"size": -' + b"9" * 50 + b"}", "size is an integer of 50 digits"),
        (b'{"size": 1, "other": 2, "size": 3}', "'size' is there twice; leave one of them"),
    ],
    ids=["many digits", "in lists", "negative", "twice"],
)
def test_json_that_no_one_means_is_refused_with_the_file_and_the_field(tmp_path, content, reason):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.json cannot be read as JSON: ") as refusal:
        read_json(tmp_path / "x.json")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"vocab_size": 0}, "config.json has vocab_size=0; 1 to 2147483647 are accepted"),
        ({"pad_token_id": 10**18}, "config.json has pad_token_id=1000000000000000000; -100 to 99 are accepted"),
        ({"head_dim": float("inf")}, "config.json has head_dim=inf; 0 to "),
        ({"rms_norm_eps": float("nan")}, "config.json has rms_norm_eps=nan; a finite number is accepted"),
        ({"rope_parameters": {"rope_theta": 0}}, "config.json has rope_theta=0; a number above 0 is accepted"),
        ({"tie_word_embeddings": "yes"}, "config.json has tie_word_embeddings='yes'; true or false is accepted"),
        ({"num_hidden_layers": 10**6}, "config.json has num_hidden_layers=1000000, and the files have 1 layers"),
        ({"num_experts_per_tok": 9}, "config.json has num_experts_per_tok=9; 1 to 8 are accepted"),
        ({"n_group": 3, "topk_group": 1}, "config.json has n_group=3, which does not divide 8 experts"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_no_model_can_have_are_refused_by_name(tmp_path, changes, sentence):
    write_folder(tmp_path, {SINGLE_FILE: {"model.layers.0.x": torch.ones(1)}})
    config = {"model_type": "qwen3_moe", "vocab_size": 100, **SIZES, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as refusal:
        describe(checkpoint)
    assert sentence in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_names_from_files_reach_no_terminal_raw(tmp_path):
    names = ["\x1b[2J\x1b[31mred", "two\nlines", "turned\u202eround", "bell\a"]
    write_folder(
        tmp_path, {"1.safetensors": {"a": torch.ones(1)}}, dict.fromkeys([*names, "half\ud800"], "1.safetensors")
    )
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(tmp_path)
    message = str(refusal.value)
    assert message.isprintable() and message.encode()
    for escaped in (r"\x1b[2J\x1b[31mred", r"two\nlines", r"turned\u202eround", r"bell\x07", r"half\ud800"):
        assert escaped in message
    assert pickle.loads(pickle.dumps(refusal.value)).args == refusal.value.args


def test_a_tensor_with_an_endless_name_is_refused(tmp_path):
    write_folder(tmp_path, {SINGLE_FILE: {f"model.layers.{'9' * 5000}.x": torch.ones(1)}})
    with pytest.raises(CheckpointError, match="has 5015 characters; up to 1000 are accepted"):
        Checkpoint.open(tmp_path)


def test_json_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(CheckpointError, match="x.json cannot be read as JSON"):
        read_json(tmp_path / "x.json")


def test_pickles_are_never_loaded(tmp_path):
    """The file would say so if it were: loading it ends the process."""

    class Bomb:
        def __reduce__(self):
            return os._exit, (17,)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle, and pickles are never loaded"):
        Checkpoint.open(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_what_is_not_a_folder_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{path} is not a folder; a checkpoint is one with config.json"):
        Checkpoint.open(tmp_path / path)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint.open(tmp_path)


# ---- what config.json says of the experts --------------------------------------------------------------------------

SIZES = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("architecture", "changes", "layers"),
    [
        ("qwen3_moe", {}, (0, 1, 2, 3)),
        ("qwen3_moe", {"mlp_only_layers": [1]}, (0, 2, 3)),
        ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ("qwen2_moe", {"mlp_only_layers": None}, (0, 1, 2, 3)),
        ("deepseek_v3", {"first_k_dense_replace": 3}, (3,)),
        ("deepseek_v2", {"first_k_dense_replace": 0}, (0, 1, 2, 3)),
        ("llama4", {"interleave_moe_layer_step": 2}, (1, 3)),
        ("llama4_text", {"moe_layers": [2]}, (2,)),
        ("mixtral", {}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts_are_those_of_the_model(architecture, changes, layers):
    sizes = SIZES | changes
    config = {"model_type": architecture, **({"text_config": sizes} if architecture == "llama4" else sizes)}
    modules = [name for name, _ in expert_modules(empty_model(config_of(config)))]
    assert tuple(int(LAYER.match(name)[2]) for name in modules) == layers


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *(
            ("qwen3_moe", {name: value})
            for name in SIZES
            if name != "intermediate_size"
            for value in (0, -1, 1.5, "8", [8], True, {})
            if (name, value) != ("num_experts", 0)  # a model without experts
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("qwen3_moe", {"decoder_sparse_step": "x"}),
        ("qwen3_moe", {"mlp_only_layers": 5}),
        ("qwen3_moe", {"hidden_act": "softplus"}),
        ("qwen3_moe", {"hidden_act": []}),
        ("gpt_oss", {"swiglu_limit": "x"}),
        ("gpt_oss", {"swiglu_limit": 0}),
        ("gpt_oss", {"swiglu_limit": None}),
        ("deepseek_v3", {"first_k_dense_replace": "x"}),
        ("llama4", {"interleave_moe_layer_step": 0}),
        ("llama4", {"moe_layers": 3}),
    ],
)
def test_nonsense_in_the_configuration_is_refused(tmp_path, architecture, changes):
    write_folder(tmp_path, {SINGLE_FILE: {"model.layers.0.x": torch.ones(1)}})
    sizes = SIZES | changes
    config = {"model_type": architecture, **({"text_config": sizes} if architecture == "llama4" else sizes)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises((CheckpointError, UnsupportedScheme)) as refusal:
        describe(checkpoint)
    assert str(refusal.value)


@pytest.mark.parametrize("model_type", ["qwen33_moe", None, 5, [], {}])
def test_an_unknown_architecture_is_refused_by_name(tmp_path, model_type):
    write_folder(tmp_path, {SINGLE_FILE: {"model.layers.0.x": torch.ones(1)}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(CheckpointError) as refusal:
        describe(checkpoint)
    assert f"model_type {model_type!r} is not known to transformers" in str(refusal.value)
