"""The ledger of bits: outputs have the hashes of tests/data/bits.json, and the tool notices changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bits
import pytest
import torch
from bit_cases import AMX, PORTABLE, Case, Collected, Recorder, Setting, collect
from bit_ledger import compare, merge
from bit_numbers import RoundedOnce, integers, numbers

from cpumoe import ops

SECONDS = 1200.0  # at most, on a busy machine


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, which imports what this one imports."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, bits.__file__, *arguments]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )


def test_fast_part_has_the_bits_of_the_ledger() -> None:
    done = run_tool("--fast")
    assert done.returncode == 0, done.stdout[-20000:]


@pytest.mark.full
def test_all_outputs_have_the_bits_of_the_ledger() -> None:
    done = run_tool()
    assert done.returncode == 0, done.stdout[-20000:]


def test_ledger_is_sorted_with_one_line_for_each_entry() -> None:
    text = bits.LEDGER.read_text()
    entries = json.loads(text)
    assert set(entries) == {PORTABLE, AMX}
    assert text == json.dumps(entries, indent=1, sort_keys=True) + "\n"
    assert all(len(value) == 16 for part in entries.values() for value in part.values())
    assert entries[AMX].keys() <= entries[PORTABLE].keys()


def test_changed_entry_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(bits.LEDGER.read_text())
    name = "rms_norm/bf16/rounded last"
    entries[PORTABLE][name] = "0" * 16
    changed = tmp_path / "bits.json"
    changed.write_text(json.dumps(entries))
    assert bits.main(["--only", "rms_norm", "--file", str(changed)]) == 1
    out = capsys.readouterr().out
    assert f"{name}: the ledger has {'0' * 16}, found " in out
    assert "12 entries compared" in out and "1 differ" in out


def test_missing_and_unknown_entries_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads(bits.LEDGER.read_text())
    del entries[PORTABLE]["rms_norm/fp32/rounded last"]
    entries[PORTABLE]["rms_norm/fp32/gone"] = "0" * 16
    changed = tmp_path / "bits.json"
    changed.write_text(json.dumps(entries))
    assert bits.main(["--only", "rms_norm/fp32", "--file", str(changed)]) == 1
    out = capsys.readouterr().out
    assert "rms_norm/fp32/rounded last: not in the ledger" in out
    assert "rms_norm/fp32/gone: the ledger has 0000000000000000, but no case computes it" in out


def test_changed_kernel_result_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One ulp of one number, in a result that all kernels agree on."""
    original = ops.rms_norm

    def changed(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        out = original(x, *arguments)  # type: ignore[arg-type]
        if x.dtype == torch.float32:
            out.view(-1)[3] = torch.nextafter(out.view(-1)[3], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(ops, "rms_norm", changed)
    assert bits.main(["--only", "rms_norm"]) == 1
    out = capsys.readouterr().out
    assert "12 entries compared" in out and "4 differ" in out
    assert "rms_norm/fp32/rounded first: the ledger has" in out and "rms_norm/bf16" not in out


def test_results_that_depend_on_threads_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also when the first result is that of the ledger; and such a ledger is not written."""
    import cpumoe

    original = ops.router_logits
    monkeypatch.setattr(ops, "router_logits", lambda *arguments: original(*arguments) + (cpumoe.get_num_threads() == 3))
    assert bits.main(["--only", "router_logits/fp32"]) == 1
    out = capsys.readouterr().out
    assert "router_logits/fp32/in fp32 (equal bits expected): " in out and "3 threads" in out
    assert "the ledger has" not in out
    path = tmp_path / "bits.json"
    assert bits.main(["--only", "router_logits/fp32", "--write", "--file", str(path)]) == 1
    assert not path.exists()


def test_case_that_raises_is_reported() -> None:
    def fail() -> None:
        raise ValueError("no such input")

    found = collect([Case("broken", fail)])  # type: ignore[arg-type]
    comparison = compare({PORTABLE: {}, AMX: {}}, found, lambda name: True)
    assert comparison.differences == {"broken (raised)": "ValueError: no such input"}


def test_writing_keeps_entries_of_other_machines_and_of_cases_that_were_not_run() -> None:
    stored = {PORTABLE: {"a/x": "1", "b/x": "2", "b/gone": "3"}, AMX: {"a/x": "4", "b/x": "5", "b/gone": "6"}}
    found = Collected(entries={PORTABLE: {"b/x": "7"}, AMX: {}})
    merged = merge(stored, found, lambda name: name.startswith("b/"), has_amx=False)
    assert merged == {PORTABLE: {"a/x": "1", "b/x": "7"}, AMX: {"a/x": "4", "b/x": "5"}}
    found = Collected(entries={PORTABLE: {"b/x": "7"}, AMX: {"b/x": "8"}})
    merged = merge(stored, found, lambda name: name.startswith("b/"), has_amx=True)
    assert merged == {PORTABLE: {"a/x": "1", "b/x": "7"}, AMX: {"a/x": "4", "b/x": "8"}}


def test_entries_of_amx_are_not_compared_without_amx() -> None:
    stored = {PORTABLE: {"a/x": "1"}, AMX: {"a/x": "2"}}
    comparison = compare(stored, Collected(entries={PORTABLE: {"a/x": "1"}, AMX: {}}), lambda name: True)
    assert (comparison.compared, comparison.skipped, comparison.differences) == (1, 1, {})


def test_amx_has_entries_of_its_own_for_rows_of_floats_only() -> None:
    for rounds, expected in ((True, {PORTABLE: ["1"], AMX: ["2"]}), (False, {PORTABLE: ["1"], AMX: []})):
        case = Case("a", lambda: lambda recorder: None, rounds_on_amx=rounds)
        recorder, found = Recorder(case), Collected()
        recorder.add_hash("x", "1", setting=Setting("scalar", 1))
        recorder.add_hash("x", "2", setting=Setting("amx", 1))
        recorder.finish(found)
        assert {arithmetic: list(own.values()) for arithmetic, own in found.entries.items()} == expected
        assert bool(found.unequal) == (not rounds)


def test_inputs_are_the_same_on_every_machine() -> None:
    assert numbers("a", 4).tolist() == [0.6000518798828125, -1.002410888671875, 0.40625, 0.098358154296875]
    assert integers("a", -5, 5, 6).tolist() == [0, 1, -1, -4, -2, 1]
    with RoundedOnce():
        angles = torch.arange(1000, dtype=torch.float32) / 7
        assert torch.equal(angles.cos(), angles.double().cos().float())
        assert torch.equal(10000.0 ** angles.neg(), (10000.0 ** angles.double().neg()).float())
