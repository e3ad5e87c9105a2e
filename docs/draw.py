"""Draws every picture of README.md and docs/ anew, into docs/pictures.

    python docs/draw.py               all of them
    python docs/draw.py house results only these

Each picture is made by a real run of what it shows. Those in HELD come out the same wherever the pinned versions are
installed, and a test holds them; `probe` measures the machine that it runs on, and screenshots need a Chromium:
CHROMIUM names it, or it is on PATH. A picture that cannot be drawn is named, and the others are drawn. The
architecture's picture is the only one that is drawn by hand.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "docs")]

import chart  # noqa: E402 (the checkout has to be on the path)
import house  # noqa: E402
import terminal  # noqa: E402
import yaml  # noqa: E402

from autotune_offload.cli.stored import read_profiles  # noqa: E402
from autotune_offload.profiles.yaml_form import to_text  # noqa: E402
from benchmarks import results  # noqa: E402
from benchmarks.tables import Latest  # noqa: E402

PICTURES = CHECKOUT / "docs" / "pictures"
MODEL = "--params 7b"
SIZE, EDGE = {"width": 1100, "height": 700}, 16
CROPS = {
    "report": ("", "Why"),
    "costs": ("What each way costs", "Where the time of one gradient goes"),
    "curves": ("Where the time of one gradient goes", "What is written into the config"),
}
"""Of the report's page: from one heading to before another."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="autotune-offload-pictures-")  # gone with the process


@functools.cache
def simulated() -> Path:
    """A folder with what the pictures of a described machine show: its profile and its trace."""
    folder = Path(_folder().name)
    profile = terminal.said(f"simulate gh200 {MODEL} --trace trace.json --json", folder)
    (folder / "gh200.json").write_text(profile, encoding="utf-8")
    return folder


def draw_house() -> str:
    """The rooms."""
    return house.drawn()


def draw_results() -> str:
    """README's first table as bars."""
    return chart.results(Latest(results.read()))


def draw_explain() -> str:
    """Why a choice, on a described machine."""
    text = terminal.cut(terminal.said("explain gh200.json", simulated()), "Why not the others")
    typed = f"$ autotune-offload simulate gh200 {MODEL} --json > gh200.json\n$ autotune-offload explain gh200.json\n"
    return terminal.drawn(typed + text, "a described GH200: simulated, not measured")


def draw_trace() -> str:
    """The chosen way, the next best, and the installed DeepSpeed's own."""
    return chart.lanes(json.loads((simulated() / "trace.json").read_text(encoding="utf-8")), ways=3)


def draw_fleet() -> str:
    """Six hosts on paper, of which one has half a link."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        described = (CHECKOUT / "configs" / "machines" / "a100_pcie4.yaml").read_text(encoding="utf-8")
        (folder / "profiles").mkdir()
        for number in range(1, 7):
            machine = yaml.safe_load(described)
            machine["name"] = f"node-{number}"
            if number == 5:
                for memory in machine["d2h"].values():
                    memory["bandwidth_gbps"] /= 2
            (folder / "machine.yaml").write_text(yaml.safe_dump(machine), encoding="utf-8")
            found = terminal.said(
                f"simulate machine.yaml --plan quick --noise 0.02 --seed {number} --json", folder
            )
            (folder / "found.json").write_text(found, encoding="utf-8")
            (profile,) = read_profiles(folder / "found.json")
            (folder / "profiles" / f"node-{number}.yaml").write_text(to_text(profile), encoding="utf-8")
        text = terminal.said("fleet profiles", folder)
    return terminal.drawn(
        f"$ autotune-offload fleet profiles\n{text}", "six described hosts, one with half a link"
    )


def draw_probe() -> str:
    """This machine, with its name and this user's home left out."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        before = os.environ.get("AUTOTUNE_OFFLOAD_CACHE")
        os.environ["AUTOTUNE_OFFLOAD_CACHE"] = str(folder / "profiles")
        try:
            text = terminal.said("probe --params 125M", folder)
        finally:
            os.environ.pop("AUTOTUNE_OFFLOAD_CACHE")
            if before is not None:
                os.environ["AUTOTUNE_OFFLOAD_CACHE"] = before
    text = re.sub(r"^profile .*\n(?: {9}.*\n)*", "", text, flags=re.MULTILINE)
    text = text.replace(f" {platform.node()}: ", " host: ")
    text = terminal.cut(text, "h2d, host to device", "Candidates")
    text = terminal.cut(text, "Optimizer step", "Choice")
    return terminal.drawn(f"$ autotune-offload probe --params 125M\n{text}", "two CPU cores, no accelerator")


def draw_pages() -> None:
    """The report's head and its curves, light and dark."""
    from playwright.sync_api import sync_playwright

    found = [
        os.environ.get("CHROMIUM"),
        *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
    ]
    chromium = next(filter(None, found), None)
    if chromium is None:
        raise RuntimeError("no Chromium: install the package `chromium`, or name one in CHROMIUM")
    terminal.said("report gh200.json -o report.html", simulated())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            page.goto((simulated() / "report.html").as_uri())
            for name, (begin, end) in CROPS.items():
                top, bottom = (
                    page.get_by_role("heading", name=words).first.bounding_box() if words else None
                    for words in (begin, end)
                )
                y = top["y"] - EDGE if top else 0
                clip = {
                    "x": 0,
                    "y": y,
                    "width": SIZE["width"],
                    "height": bottom["y"] - EDGE - y if bottom else 0,
                }
                file = PICTURES / f"{name}-{scheme}.png"
                page.screenshot(path=file, clip=clip, full_page=True)  # type: ignore[arg-type]
        browser.close()


HELD: dict[str, Callable[[], str]] = {
    "house": draw_house,
    "results": draw_results,
    "explain": draw_explain,
    "trace": draw_trace,
}
ALL: dict[str, Callable[[], str | None]] = {
    **HELD,
    "fleet": draw_fleet,
    "probe": draw_probe,
    "pages": draw_pages,
}


def main() -> int:
    """Draw; 1 where one could not be drawn."""
    failed = 0
    for name in sys.argv[1:] or ALL:
        try:
            drawn = ALL[name]()
        except Exception as error:
            print(f"{name}: not drawn: {error}", file=sys.stderr)
            failed = 1
            continue
        if drawn is not None:
            (PICTURES / f"{name}.svg").write_text(drawn, encoding="utf-8")
        print(f"{name}: drawn", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
