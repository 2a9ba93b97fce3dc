"""Install the wheel of `dist/` in an empty virtual environment and run the README's first Python example with it.

The example runs in an empty folder and in isolated mode, so that nothing but the wheel and what it asks for can be
imported. Exits with 1 and one line saying what is wrong.
"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Runs with the wheel's interpreter, before the example.
ORIGIN = """
import pathlib, sys, gated_delta
folder = pathlib.Path(gated_delta.__file__).parent
assert folder.is_relative_to(sys.prefix), f"gated_delta was imported from {folder}, not from the wheel"
assert (folder / "py.typed").is_file(), "the wheel has no gated_delta/py.typed"
"""


def first_python_block(markdown: str) -> str:
    """The text of the first fenced block that opens with exactly ```python. Raises `ValueError` if there is none."""
    match = re.search(r"^```python[ \t]*\n(.*?)^```[ \t]*$", markdown, flags=re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError("README.md has no block that opens with ```python")
    return match.group(1)


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; show what it printed and exit with 1 if it fails."""
    result = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
        sys.exit(f"error: this command failed in {cwd}: {' '.join(map(str, command))}")


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"error: dist/ must hold one wheel, and holds {len(wheels)}: run `make dist`")
    example = first_python_block((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        work = folder / "work"
        work.mkdir()
        run(python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", wheels[0], cwd=work)
        (work / "example.py").write_text(example, encoding="utf-8")
        run(python, "-I", "-c", ORIGIN, cwd=work)
        run(python, "-I", "example.py", cwd=work)
    lines = example.count("\n")
    print(f"dist/{wheels[0].name}: installed in an empty environment, ran the README's first example ({lines} lines).")


if __name__ == "__main__":
    main()
