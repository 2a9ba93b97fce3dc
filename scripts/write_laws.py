"""Write the laws into docs/testing-your-kernel.md, a section for each, from where they are stated."""

from pathlib import Path

from gated_delta.testing import LAWS, LAYER_LAWS, STEP_LAWS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "testing-your-kernel.md"
MARK = "<!-- laws: written by `python scripts/write_laws.py` -->\n"


def page() -> str:
    """The page with its laws as they are now."""
    parts = [PAGE.read_text(encoding="utf-8").split(MARK)[0], MARK]
    for title, laws in (("", LAWS), ("Of layers", LAYER_LAWS), ("Of an own step", STEP_LAWS)):
        parts += [f"\n### {title}\n"] if title else []
        level = "####" if title else "###"
        parts += [f"\n{level} {law.name}\n\n{law.claim}\n\n$${law.formula}$$\n" for law in laws.values()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
