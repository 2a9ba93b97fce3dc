"""Every Python block of the README and of docs/ runs, file by file, in the order in which it is read.

`make docs` runs them.
"""

import pathlib
import re
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [pytest.param(page, marks=pytest.mark.docs, id=page.name) for page in PAGES]
OPTIONAL = ["flax"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, monkeypatch):
    text = page.read_text()
    for module in OPTIONAL:
        if f"from {module} import" in text:
            pytest.importorskip(module, reason=f"{page.name} needs {module}, which is in the `docs` extra alone")
    names = {"__name__": "__docs__"}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with jax.numpy_dtype_promotion("standard"):  # as for a reader
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start(1))
            exec(compile("\n" * line + block.group(1), str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_has_code_to_run():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 4
