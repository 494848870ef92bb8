"""Check that each folder of core/ includes only headers of itself and of the folders before it."""

import re
import sys
from pathlib import Path

FOLDERS = ("runtime", "kernels", "packed", "ops", "ranks", "decoder", "bind")
TESTS = "tests"  # may include every folder


def problems(core: Path) -> list[str]:
    """Return a line for each include that is out of order, and for each file outside of the known folders."""
    found = []
    for path in sorted([*core.rglob("*.h"), *core.rglob("*.cc")]):
        place = path.relative_to(core)
        folder = place.parts[0]
        if len(place.parts) == 1 or folder not in (*FOLDERS, TESTS):
            found.append(f"{path}: expected in one of core/{{{','.join((*FOLDERS, TESTS))}}}")
            continue
        allowed = (*FOLDERS, TESTS) if folder == TESTS else FOLDERS[: FOLDERS.index(folder) + 1]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            included = re.match(r'\s*#include "([^"]+)"', line)
            if included is None:
                continue
            if not (core / included[1]).is_file():
                found.append(f"{path}:{number}: {included[1]} is not a path below core/")
            elif included[1].split("/")[0] not in allowed:
                found.append(
                    f"{path}:{number}: {folder}/ may not include {included[1]}; it may include {', '.join(allowed)}"
                )
    return found


if __name__ == "__main__":
    lines = problems(Path(__file__).parent)
    print("\n".join(lines) or "core/: includes are in order")
    sys.exit(bool(lines))
