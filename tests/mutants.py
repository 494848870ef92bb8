"""Mutation testing: change one operator or number of the sources at a time, and see whether `make test` fails.

    .venv/bin/python tests/mutants.py                  # draws 30 mutants over all folders, tests each with `make test`
    .venv/bin/python tests/mutants.py --count 10 --seed 7
    .venv/bin/python tests/mutants.py --only 4,9 --tests full    # two of them again, with the tests of `make test-all`

A mutant is killed when a test fails, and survives when none does. Mutants are drawn from a seed, the same ones for the
same sources. Each runs in a copy of the package below build/mutants; the checkout itself is not changed. C++ mutants
are compiled with -O1 in a build folder of their own, tested by core_test and then from Python. Test files that name the
mutated module run first, since most mutants die there.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "mutants"

_COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*"}
#: Patterns of C++ with their replacement; spaces keep templates and pointers out.
_CXX = [
    (r" < (?!<)", " <= "),
    (r" <= ", " < "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" != ", " == "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"std::min\b", "std::max"),
    (r"std::max\b", "std::min"),
    (r"\+= ", "-= "),
]


@dataclass(frozen=True)
class Mutant:
    """One change of one line: ``line`` counts from 1, columns from 0 in bytes."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        """Return the file's text with the change."""
        lines = text.split("\n")
        row = lines[self.line - 1].encode()
        lines[self.line - 1] = (row[: self.start] + self.new.encode() + row[self.end :]).decode()
        return "\n".join(lines)

    def describe(self) -> str:
        """Return the place and the changed line."""
        text = (ROOT / self.file).read_text()
        old = text.split("\n")[self.line - 1].strip()
        new = self.apply(text).split("\n")[self.line - 1].strip()
        return f"{self.file}:{self.line}: {old}  ->  {new}"


def _between(text: list[str], left: ast.expr, right: ast.expr, new: str, file: str) -> Iterator[Mutant]:
    """Yield the mutant that replaces the operator between two operands on one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None:
        gap = text[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if "(" not in gap and ")" not in gap:
            yield Mutant(file, right.lineno, left.end_col_offset, right.col_offset, f" {new} ")


def python_mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a Python file: comparisons, arithmetic, ``and``/``or``, ``not`` and small integers."""
    text = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            yield from _between(text, node.left, node.comparators[0], _COMPARISONS[type(node.ops[0])], file)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node):
            yield from _between(text, node.left, node.right, _OPERATORS[type(node.op)], file)
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield from _between(text, node.values[0], node.values[1], new, file)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(file, node.lineno, node.col_offset, node.operand.col_offset, "")
        elif isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 64:
            assert node.end_col_offset is not None
            yield Mutant(file, node.lineno, node.col_offset, node.end_col_offset, str(node.value + 1))


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operand is a literal text: formatting is not arithmetic."""
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def cxx_mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a C++ file, outside of comments, texts, templates' heads and the preprocessor."""
    for number, line in enumerate(source.split("\n"), 1):
        code = re.sub(r'"(\\.|[^"\\])*"', lambda found: '"' + "_" * (len(found[0]) - 2) + '"', line.split("//")[0])
        if not code.strip() or code.lstrip().startswith(("#", "*", "template", "static_assert", "using")):
            continue
        for pattern, new in _CXX:
            for found in re.finditer(pattern, code):
                yield Mutant(file, number, len(code[: found.start()].encode()), len(code[: found.end()].encode()), new)


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw mutants: a folder in turn, then a file of it by its size, then a place in it."""
    listed = subprocess.check_output(["git", "ls-files", "core", "src"], cwd=ROOT, text=True).split()
    folders: dict[str, list[str]] = {}
    for name in listed:
        path = Path(name)
        # `make test-vllm` covers the plug-in, in an environment of its own.
        skipped = "tests" in path.parts or "vllm" in name or path.name == "__init__.py"
        if path.suffix in (".py", ".cc", ".h") and not skipped:
            folders.setdefault(str(path.parent), []).append(name)
    random_ = random.Random(seed)
    order = sorted(folders)
    random_.shuffle(order)
    mutants: list[Mutant] = []
    while len(mutants) < count:
        files = folders[order[len(mutants) % len(order)]]
        sizes = [(ROOT / file).stat().st_size for file in files]
        (file,) = random_.choices(files, sizes)
        source = (ROOT / file).read_text()
        found = list(python_mutants(file, source) if file.endswith(".py") else cxx_mutants(file, source))
        if found:
            mutants.append(random_.choice(found))
    return mutants


def covering_tests(mutant: Mutant) -> list[str]:
    """Return the test files that name the mutated module or one that imports it."""
    module = Path(mutant.file).stem
    tests = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "vllm" not in str(path)
    )
    if mutant.file.startswith("core/"):
        return [test for test in tests if test.count("/") == 1 or test.startswith("tests/layers/")]
    users = {module}
    for path in (ROOT / "src").rglob("*.py"):
        if re.search(rf"\b{module}\b", path.read_text()):
            users.add(path.stem)
    users.discard("__init__")
    direct = [test for test in tests if re.search(rf"\b{module}\b", (ROOT / test).read_text())]
    through = [
        t for t in tests if any(re.search(rf"import .*\b{u}\b|\.{u} import", (ROOT / t).read_text()) for u in users)
    ]
    folder = [test for test in tests if Path(test).parent.name == Path(mutant.file).parent.name]
    return list(dict.fromkeys([*direct, *folder, *through]))


def _run(command: list[str], environment: dict[str, str], limit: float) -> str | None:
    """Return the first line that tells why a command failed; None if it did not fail."""
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not finished within {limit:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stdout + done.stderr).split("\n") if re.match(r"FAILED|ERROR|E  ", line)]
    return lines[0][:160] if lines else f"exit status {done.returncode}"


def _build(source: Path) -> str | None:
    """Build core_test and the extension of mutated sources; return what failed."""
    build = WORK / "build"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = ["-DCPUMOE_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
    options.append("-DCPUMOE_EMULATE=ON")
    configure = ["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *options]
    problem = _run(configure, environment, 300)
    return problem or _run(["cmake", "--build", str(build), "--target", "core_test", "_core"], environment, 1800)


def kill(mutant: Mutant, every_test: bool) -> str | None:
    """Run the tests on a mutant; return what killed it, None if it survived."""
    package = WORK / "package"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for name in ("cpumoe", "cpumoe_command"):
        shutil.copytree(ROOT / "src" / name, package / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    in_core = mutant.file.startswith("core/")
    if in_core:
        source = WORK / "source"  # kept, so that only what is changed is compiled again
        source.mkdir(exist_ok=True)
        subprocess.run(
            ["rsync", "-a", "--checksum", str(ROOT / "core"), str(ROOT / "CMakeLists.txt"), str(source)], check=True
        )
        (source / mutant.file).write_text(mutant.apply((ROOT / mutant.file).read_text()))
        problem = _build(source)
        (source / mutant.file).write_text((ROOT / mutant.file).read_text())
        if problem:
            return f"does not compile: {problem}"
        problem = _run([str(WORK / "build" / "core_test")], dict(os.environ), 600)
        if problem:
            return f"core_test: {problem}"
        extension = WORK / "build"
    else:
        target = package / Path(mutant.file).relative_to("src")
        target.write_text(mutant.apply(target.read_text()))
        extension = ROOT / "build" / "core"
    for file in extension.glob("_core*.so"):
        shutil.copy(file, package / "cpumoe")
    environment = {**os.environ, "PYTHONPATH": str(package)}
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    pytest += ["-m", "full or not full"] if every_test else []
    tests = covering_tests(mutant)
    problem = _run([*pytest, *tests], environment, 1800) if tests else None
    return problem or _run([*pytest, "tests"], environment, 3600)


def main() -> int:
    """Draw mutants, test each, and print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="numbers of mutants, with commas in between")
    parser.add_argument(
        "--tests", choices=["test", "full"], default="test", help="those of make test, or of make test-all"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and test none")
    arguments = parser.parse_args()
    mutants = list(enumerate(draw(arguments.count, arguments.seed)))
    if arguments.only:
        wanted = {int(number) for number in arguments.only.split(",")}
        mutants = [(number, mutant) for number, mutant in mutants if number in wanted]
    survivors = 0
    for number, mutant in mutants:
        print(f"{number:3d} {mutant.describe()}", flush=True)
        if not arguments.list:
            start = time.monotonic()
            problem = kill(mutant, arguments.tests == "full")
            survivors += problem is None
            print(f"    {time.monotonic() - start:.0f} s: {problem or 'SURVIVED'}", flush=True)
    if not arguments.list:
        print(f"{len(mutants) - survivors} killed, {survivors} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
