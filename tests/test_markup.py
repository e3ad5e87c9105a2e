"""In a notebook: what a choice, a profile and a report show, and that nothing of it is taken for markup."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

from autotune_offload import markup
from autotune_offload.api.report import Report
from autotune_offload.records import Change
from tests import CHECKOUT
from tests.factories import make_choice, make_profile


class Reader(HTMLParser):
    """The elements, whether each is closed, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens."""
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes the last one."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """What is read."""
        self.text += data


HOSTILE = "<script>alert('&')</script>"


def test_everything_is_escaped() -> None:
    """Title, names, values and sentences."""
    found = Reader(markup.table(HOSTILE, [(HOSTILE, HOSTILE)], [HOSTILE]))
    assert found.seen == {"table", "caption", "tr", "th", "td", "ul", "li"}
    assert found.text.count(HOSTILE) == 4


def test_without_sentences_there_is_no_list() -> None:
    """Nor is one left empty."""
    assert "ul" not in Reader(markup.table("a", [("b", "c")])).seen


def test_a_choice_shows_what_was_decided_and_why() -> None:
    """Path, gain, pins, and each reason; what does not beat DeepSpeed is said to stay."""
    choice = make_choice(
        gain=2.5, noise=0.1, pin_optimizer=True, pin_parameters=False, reasons=(HOSTILE, "two")
    )
    text = Reader(choice._repr_html_()).text
    assert choice.path in text and "2.50 times as fast, noise 10.0%" in text
    assert HOSTILE in text and "two" in text and "optimizer state" in text and "this path" in text
    assert "DeepSpeed's own code, as nothing beats it" in Reader(make_choice(gain=1.0)._repr_html_()).text


def test_a_profile_shows_where_it_was_measured() -> None:
    """Host, device, versions, and the choice."""
    profile = make_profile()
    text = Reader(profile._repr_html_()).text
    for word in (profile.host.name, profile.device.name, profile.software.deepspeed, profile.choice.path):
        assert word in text


def test_a_report_shows_the_choice_and_its_text() -> None:
    """With and without a profile, and with a value that looks like markup."""
    change = Change(key="a", before=None, after=HOSTILE, reason="b")
    report = Report(profile=make_profile(), changes=(change,))
    found = Reader(report._repr_html_())
    assert report.text() in found.text and {"table", "pre"} <= found.seen
    bare = Reader(Report(profile=None, notices=("switched off",))._repr_html_())
    assert "switched off" in bare.text and bare.seen == {"pre"}


def test_showing_a_profile_loads_nothing_heavy() -> None:
    """Neither torch nor what draws the page."""
    script = (
        "import sys; from tests.factories import make_profile; make_profile()._repr_html_(); "
        "print({'torch', 'deepspeed', 'optuna', 'jinja2', 'vl_convert'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
