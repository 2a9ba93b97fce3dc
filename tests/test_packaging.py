"""What a user installs, the commands that the documents name, and what the set-up says when something is missing."""

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gated_delta"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUN_TIME_DEPENDENCIES = {"jax", "equinox", "jaxtyping"}


def imported_packages(source: str) -> set[str]:
    """Top-level names of everything a module imports from outside its own package, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


def test_the_run_time_dependencies_are_three():
    assert {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]} == RUN_TIME_DEPENDENCIES


def test_the_package_imports_only_what_it_depends_on():
    allowed = RUN_TIME_DEPENDENCIES | {"numpy", "gated_delta"} | sys.stdlib_module_names  # jax itself needs numpy
    optional = {"checkpoints": {"safetensors"}}
    modules = [path for path in PACKAGE.rglob("*.py") if "testing" not in path.relative_to(PACKAGE).parts]
    assert modules
    foreign = {
        path.name: imported_packages(path.read_text(encoding="utf-8")) - allowed - optional.get(path.parent.name, set())
        for path in modules
    }
    assert {name: names for name, names in foreign.items() if names} == {}


def test_the_package_ships_its_types():
    assert resources.files("gated_delta").joinpath("py.typed").is_file()


def test_every_extra_the_readme_names_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = {extra for names in re.findall(r"(?:gated-delta|\.)\[([\w,-]+)\]", text) for extra in names.split(",")}
    assert extras, "the README names no extra"
    assert extras <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_a_document_names_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    blocks = re.findall(r"^```.*?^```", text, flags=re.MULTILINE | re.DOTALL)
    commands = "\n".join([*blocks, *re.findall(r"`(make [^`]*)`", text)])
    named = {
        name for names in re.findall(r"^make((?: [a-z-]+)+)", commands, flags=re.MULTILINE) for name in names.split()
    }
    assert "test" in named
    assert named <= targets


def set_up(tmp_path: Path, *, python3: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/venv.sh with the shell script `python3` as the only Python there is, and a venv folder of its own."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "ls"):
        (tools / tool).symlink_to(shutil.which(tool))
    if python3 is not None:
        (tools / "python3").write_text(f"#!/bin/sh\n{python3}\n")
        (tools / "python3").chmod(0o755)
    variables = {"PATH": str(tools), "VENV": str(tmp_path / "venv"), **environment}
    command = ["/bin/sh", str(ROOT / "scripts" / "venv.sh"), "test"]
    return subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)


OLD = 'case "$2" in *print*) echo "3.9.18 /usr";; *) exit 1;; esac'
NEW = 'case "$2" in *print*) echo "3.12.1 /usr";; esac'
WITHOUT_VENV = 'case "$2" in *print*) echo "3.12.1 /usr";; *ensurepip*) exit 1;; esac'


@pytest.mark.parametrize(
    ("python3", "environment", "message"),
    [
        (None, {}, "there is no working python3: install Python 3.11 or newer, or name one"),
        ("exit 127", {}, "there is no working python3: install Python 3.11 or newer, or name one"),
        (None, {"PYTHON": "python3.12"}, "there is no working python3.12: install Python 3.11 or newer"),
        (OLD, {}, "python3 is Python 3.9.18, and 3.11 or newer is needed; name one"),
        (WITHOUT_VENV, {}, "python3 has no venv and ensurepip modules: install them"),
        (NEW, {"VENV": "src"}, "src exists and is no virtual environment: remove it"),
    ],
    ids=["no python3", "a shim that fails", "no such PYTHON", "too old", "no venv module", "not an environment"],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, python3, environment, message):
    result = set_up(tmp_path, python3=python3, **environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_the_wheel_is_checked_with_the_first_python_block():
    first_python_block = runpy.run_path(str(ROOT / "scripts" / "check_wheel.py"))["first_python_block"]
    text = "# Title\n```sh\nmake test\n```\n```python\nimport a\n\na.b()\n```\ntext\n```python\nimport c\n```\n"
    assert first_python_block(text) == "import a\n\na.b()\n"
    with pytest.raises(ValueError, match="no block that opens with ```python"):
        first_python_block("```sh\nmake test\n```\n")
