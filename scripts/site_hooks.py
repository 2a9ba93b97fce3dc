"""What MkDocs does for our site beside its plugins: run the notebooks, set the equations, and refuse what must not be.

A build fails where a public name has no docstring or no place in the reference, where an equation cannot be set, where
a notebook raises, and where a page would fetch anything from another host.
"""

import functools
import html
import pathlib
import re
import tempfile

import griffe
import latex2mathml.converter
import nbclient
import nbconvert
import nbformat
from jupyter_client.manager import AsyncKernelManager
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC = (
    "gated_delta",
    "gated_delta.attention",
    "gated_delta.checkpoints",
    "gated_delta.pallas",
    "gated_delta.serving",
    "gated_delta.sharding",
    "gated_delta.testing",
)
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//|\burl\(["']?(?:https?:)?//|@import\b"""
)
TAG = re.compile(r"\\tag\{(.*?)\}")
documented: set[str] = set()


# ---- notebooks -------------------------------------------------------------------------------------------------------


def on_files(files, config):
    """Every notebook becomes a page of Markdown with the outputs that running it gives now."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            name = file.src_uri.removesuffix(".ipynb")
            notebook = nbformat.read(file.abs_src_path, as_version=4)
            with tempfile.TemporaryDirectory() as sockets:  # a killed build would leave them in the repository
                kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
                where = {"metadata": {"path": str(ROOT)}}
                client = nbclient.NotebookClient(
                    notebook, km=kernel, timeout=600, coalesce_streams=True, resources=where
                )
                client.execute()
            folder = f"{pathlib.PurePosixPath(name).name}_files"
            page, made = nbconvert.MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": folder})
            files.append(File.generated(config, f"{name}.md", content=page))
            parent = pathlib.PurePosixPath(name).parent
            for path, content in made["outputs"].items():
                files.append(File.generated(config, str(parent / path), content=content))
    return files


# ---- pages -----------------------------------------------------------------------------------------------------------


def on_page_markdown(markdown, page, config, files):
    """Links that lead somewhere on the site; `::: module.*` is every public name of a module."""
    markdown = re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?:src|examples|benchmarks|tests)[^)]*\)", r"\1", markdown)
    markdown = re.sub(r"\]\(([^):]+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = re.sub(
        r"^::: (\S+)\.\*$",
        lambda match: "\n\n".join(f"::: {match[1]}.{name}" for name in public_names(match[1])),
        markdown,
        flags=re.MULTILINE,
    )
    documented.update(REFERENCE.findall(markdown))
    return markdown


def on_page_content(content, page, config, files):
    """LaTeX to MathML, which browsers set by themselves: no script and no fonts."""

    def inline(match):
        return latex2mathml.converter.convert(html.unescape(match[1]))

    def display(match):
        tex = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", html.unescape(match[1]))
        number = re.search(TAG, tex)
        label = f"<span>({number[1]})</span>" if number else ""
        tex = re.sub(TAG, "", tex)
        return f'<div class="equation">{latex2mathml.converter.convert(tex, display="block")}{label}</div>'

    try:
        content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.DOTALL)
        content = re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', display, content, flags=re.DOTALL)
    except Exception as error:
        raise PluginError(f"{page.file.src_uri}: an equation cannot be set: {error!r}") from error
    if 'class="arithmatex"' in content:
        raise PluginError(f"{page.file.src_uri}: an equation was left as it is")
    return content


# ---- what must not be ------------------------------------------------------------------------------------------------


@functools.cache
def package() -> griffe.Object:
    return griffe.load("gated_delta", search_paths=[ROOT / "src"], resolve_aliases=True)


def public_names(module: str) -> list[str]:
    """Names that a module exports, by `from ._x import Name as Name`."""
    members = package()[module.removeprefix("gated_delta.")].members if module != "gated_delta" else package().members
    return sorted(name for name, member in members.items() if member.is_alias and not name.startswith("_"))


def target(name: str) -> str:
    """Where the object of a public name is defined, which may have several names."""
    return package()[name.removeprefix("gated_delta.")].final_target.path


def on_post_build(config):
    names = [f"{module}.{name}" for module in PUBLIC for name in public_names(module)]
    if silent := [name for name in names if not package()[name.removeprefix("gated_delta.")].has_docstring]:
        raise PluginError(f"public names without a docstring: {', '.join(silent)}")
    there = {target(name) for name in names if name in documented}
    if missing := sorted(name for name in names if target(name) not in there):
        raise PluginError(f"public names that no page of the reference has: {', '.join(missing)}")
    for path in sorted(pathlib.Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css"):
            for match in FETCHED.finditer(path.read_text(encoding="utf-8")):
                raise PluginError(f"{path.name} would fetch something from another host: {match[0]}")
