"""The documentation: it builds without a warning, its code runs, its commands and links exist."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import hjson
import pytest
import yaml
from markdown_it import MarkdownIt

from autotune_offload.cli import cli
from autotune_offload.config import block as config_block
from tests import CHECKOUT
from tests.ports import free_port

PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

GIVEN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
"""
"""What a reader has before a block: a model. `ds_config.json` lies in the folder."""

DS_CONFIG = """{
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": true}},
    "zero_force_ds_cpu_optimizer": false,
    "autotune_offload": {"budget_seconds": 1},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}
    }
}
"""


@dataclass(frozen=True)
class Block:
    """One block of code of a page."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Fenced and indented blocks; an indented one is Python where it imports, else for a shell."""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            imports = re.match(r"(from|import) ", token.content)
            language = token.info.split()[0] if token.info.strip() else "python" if imports else "sh"
            yield Block(page, (token.map or [0])[0] + 1, language, token.content)


def of(*languages: str) -> list[Block]:
    """All blocks of these languages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def _named(block: Block) -> str:
    return f"{block.page.name}:{block.line}"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each call of the program in a block: at the start of a line or behind ``$``."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        found = re.match(r"\s*(?:\$ )?autotune-offload ([a-z].*)", line)
        if found:
            said = re.split(r"\s{3,}|\s[|>]|#", found[1])[
                0
            ]  # what stands behind it in words, a pipe, a comment
            yield shlex.split(said)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="the extra `docs` is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every page is in the navigation, every reference resolves, every docstring is well formed."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert [
        page.stem for page in PAGES if page.parent.name == "docs" and f"{page.stem}.html" not in index
    ] == ["index"][: "index.html" not in index]


@pytest.mark.long
@pytest.mark.slow
def test_every_python_block_runs(tmp_path: Path) -> None:
    """In turn, each with names of its own, as under a launcher with one rank."""
    (tmp_path / "ds_config.json").write_text(DS_CONFIG)
    script = tmp_path / "all_blocks.py"
    runs = [
        f"print({_named(block)!r}, flush=True)\nexec(compile({GIVEN + block.text!r}, {_named(block)!r}, 'exec'), {{}})"
        for block in of("python")
    ]
    script.write_text("\n".join(runs))
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=_launched(tmp_path)
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert len(runs) >= 3


def _launched(cache: Path) -> dict[str, str]:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = {
        "PYTHONPATH": str(CHECKOUT),
        "AUTOTUNE_OFFLOAD_CACHE": str(cache / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **rank, **address, **own}


@pytest.mark.parametrize("block", of("json"), ids=_named)
def test_every_json_block_is_a_config_or_a_document(block: Block) -> None:
    """It parses as DeepSpeed would parse it, and a block of ours in it has only keys that exist."""
    text = re.sub(r",?\s*\.\.\.\s*", "", block.text)
    found = hjson.loads(text)
    if config_block.BLOCK in found:
        config_block.settings(found)


@each_page
def test_every_command_exists(page: Path) -> None:
    """The verb and each option of every call in a block are the command line's own."""
    for block in blocks(page):
        for words in commands(block):
            if words[0].isupper():
                continue  # VERB stands for any
            command: click.Command = cli
            while isinstance(command, click.Group):
                assert words and words[0] in command.commands, (page.name, block.line, words)
                command = command.commands[words.pop(0)]
            if command.context_settings.get("ignore_unknown_options"):
                continue  # what follows `run` is another command's
            known = {spelled for each in command.params for spelled in each.opts} | {"--help", "-h"}
            used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert used <= known, (page.name, block.line, used - known)


@each_page
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    """Relative links name files that are in the repository."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http", "mailto:"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_verb_has_a_section() -> None:
    """docs/cli.md describes what the command line has."""
    headings = re.findall(r"^## (\w+)$", (CHECKOUT / "docs/cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(cli.commands) <= set(headings)


def test_a_missing_verb_or_option_would_be_seen() -> None:
    """The reader of commands finds them in a console block, past what stands behind them."""
    text = "$ autotune-offload probe --json | head\noutput\nautotune-offload show KEY    words\n"
    block = Block(CHECKOUT, 1, "console", text)
    assert list(commands(block)) == [["probe", "--json"], ["show", "KEY"]]


def test_an_issue_template_asks_for_the_page_of_a_device() -> None:
    """What `make device` writes, and the page is the one thing that has to be there."""
    form = yaml.safe_load((CHECKOUT / ".github/ISSUE_TEMPLATE/device.yml").read_text(encoding="utf-8"))
    [needed] = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert "page.md" in needed["attributes"]["label"] and "make device" in needed["attributes"]["label"]


@pytest.mark.parametrize("name", ["failure", "wrong-choice", "machine"])
def test_issue_templates_ask_for_what_doctor_says(name: str) -> None:
    """Each is a form that can be read, and asks for the block of `doctor`."""
    form = yaml.safe_load((CHECKOUT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert any("autotune-offload doctor --markdown" in label for label in labels)
