"""docs/lm-eval.md: the harness's command line finds the model and runs a task on local files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from cpumoe.demo.model import FOLDER

TASK = """\
task: imports
dataset_path: json
dataset_kwargs: {{data_files: "{folder}/imports.jsonl"}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    {"text": "import", "choices": [" os", " banana"], "label": 0},
    {"text": "def main(", "choices": ["???", "argv=None):"], "label": 1},
]


def run(tmp_path: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "imports.yaml").write_text(TASK.format(folder=tmp_path))
    (tmp_path / "imports.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    command = ["run", "--model", "cpumoe", "--model_args", arguments, "--tasks", "imports"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    return subprocess.run(
        [sys.executable, "-m", "cpumoe.integrations.lm_eval", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )


def test_a_task_on_local_files(tmp_path: Path) -> None:
    done = run(tmp_path, f"pretrained={FOLDER}")
    assert done.returncode == 0, done.stderr
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["imports"]["acc,none"] == 1.0


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, f"pretrained={FOLDER},parallelize=True")
    assert done.returncode != 0 and "--model_args has parallelize; accepted are add_bos_token" in done.stderr
