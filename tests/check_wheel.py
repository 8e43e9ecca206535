"""Check the name, content and size of wheels without CUDA: check_wheel.py dist/*.whl."""

import ast
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 5_000_000  # Bytes of a wheel.


def read_version(package=ROOT / "gas"):
    """Return the version without importing the package, as setuptools does."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{package} has no __version__")


def find_problems(wheel, root=ROOT):
    """Return a sentence for each problem of a wheel of the sources in ``root``."""
    problems = []
    wheel, release = Path(wheel), f"gas_gnn-{read_version(root / 'gas')}"
    if not wheel.name.startswith(f"{release}-"):
        problems.append(f"its name doesn't begin with {release}")
    if wheel.stat().st_size > LIMIT:
        problems.append(f"it has {wheel.stat().st_size} bytes, expected at most {LIMIT}")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    names = {name for name in names if not name.startswith(f"{release}.dist-info/")}
    binaries = {name for name in names if name.startswith("gas/_C.")}
    if len(binaries) != 1:
        problems.append(f"it has {len(binaries)} extensions, expected gas/_C")
    expected = {path.relative_to(root).as_posix() for path in (root / "gas").rglob("*.py")}
    templates = (root / "gas").rglob("*.html")
    expected |= {"gas/py.typed", *(path.relative_to(root).as_posix() for path in templates)}
    # Among others: modules of an earlier build, and libraries such as a second OpenMP runtime.
    for kind, files in (("lacks", expected - names), ("has also", names - expected - binaries)):
        problems += [f"it {kind} {name}" for name in sorted(files)]
    return problems


def main(wheels):
    found = {wheel: find_problems(wheel) for wheel in wheels}
    for wheel, problems in found.items():
        print(f"{wheel}: {'; '.join(problems) or f'{Path(wheel).stat().st_size} bytes'}")
    return 1 if not wheels or any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
