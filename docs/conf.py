"""How docs/ becomes a site: `python -m sphinx -W --keep-going -b html docs build/docs`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # the API reference imports DeepSpeed, which looks for a device

project = "autotune-offload"
author = "the autotune-offload authors"
copyright = "the autotune-offload authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]

html_theme = "furo"
html_title = "autotune-offload"
html_static_path = ["pictures"]

myst_heading_anchors = 3  # pages link to each other's headings, as they do where the Markdown is read itself

default_role = "code"  # docstrings mark code with single backticks
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False


def add_topics(app: Any, docname: str, source: list[str]) -> None:
    """Put every page that the index does not name in place of TOPICS: a new page needs no entry."""
    if docname == "index":
        pages = sorted(page.stem for page in Path(app.srcdir).glob("*.md"))
        listed = set(source[0].splitlines()) | {"index"}
        source[0] = source[0].replace("TOPICS", "\n".join(page for page in pages if page not in listed))


def copy_pictures(app: Any, exception: Exception | None) -> None:
    """Lay them where a page's `<picture>` looks for them, which Sphinx does not read."""
    if exception is None and app.builder.format == "html":
        shutil.copytree(Path(app.srcdir) / "pictures", Path(app.outdir) / "pictures", dirs_exist_ok=True)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_topics)
    app.connect("build-finished", copy_pictures)
