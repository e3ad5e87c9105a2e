"""The report page, read as a parser reads it: what it says, that it asks for nothing, that all of it is legible."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from autotune_offload import places, units, workload
from autotune_offload.api.probe import probe
from autotune_offload.cli import cli
from autotune_offload.described import machine
from autotune_offload.described.simulated import SimulatedDevice
from autotune_offload.profiles.store import Store
from autotune_offload.records import Profile, to_plain
from autotune_offload.reports import bandwidth, drawing, page
from autotune_offload.reports.steps import step_rows
from tests.factories import make_choice, make_profile

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What the tests ask of a page: its elements in order, its text, whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element opens."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that closes itself."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """An element closes."""
        if not self.open or self.open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += f" {' '.join(data.split())}"

    def ids(self) -> list[str]:
        """Every id in the page."""
        return [attrs["id"] for _, attrs in self.elements if "id" in attrs]


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A GPU host on which `staged` won."""
    return make_profile()


@pytest.fixture(scope="module")
def text(profile: Profile) -> str:
    """Its page."""
    return page.html([("a.yaml", profile)])


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    """Its page, parsed."""
    return Page(text)


def _words(parsed: Page) -> str:
    return " ".join(parsed.text.split())


# -- what it says ---------------------------------------------------------------------------------


def test_the_decision_stands_in_one_sentence_with_both_times(profile: Profile, parsed: Page) -> None:
    """Path, both costs, ratio and noise are in a sentence that ends in a full stop."""
    sentence = page.decision(profile)
    assert sentence in _words(parsed)
    for part in ("staged", "402 ms", "2.75x", "2 %"):
        assert part in sentence
    assert sentence.endswith(".") and sentence.count(". ") == 0


def test_a_gain_within_the_noise_is_no_advice_to_change() -> None:
    """The sentence keeps DeepSpeed's own code where nothing beats it."""
    kept = make_profile(choice=make_choice(gain=1.01))
    assert page.decision(kept).startswith("Keep DeepSpeed's own")
    assert page.headline(kept).startswith("Keep DeepSpeed's own")


def test_what_was_not_compared_is_not_claimed(profile: Profile) -> None:
    """Without a time of DeepSpeed's own the sentence says that it was not timed."""
    alone = structs.replace(profile, baselines=())
    assert "was not timed" in page.decision(alone)
    assert "was not timed" in page.html([("a", alone)])


def test_every_reason_warning_and_change_is_on_the_page(profile: Profile, parsed: Page) -> None:
    """Nothing that the profile says to a person is left out."""
    words = _words(parsed)
    said = [*profile.choice.reasons, *profile.warnings, *profile.stability]
    said += [change.key for change in page.diff(profile, None).changes]
    assert said and [each for each in said if " ".join(each.split()) not in words] == []


def test_accumulations_decide_where_they_were_timed() -> None:
    """Both times in the sentence are theirs, each way has its row, and no backward pass is said to decide."""
    found = probe(
        workload=workload.from_parameter_count(50_000_000, accumulation_steps=4),
        plan="quick",
        device=SimulatedDevice(machine.load("t4_pcie3")),
    )
    words = _words(Page(page.html([("accumulating", found)])))
    own, chosen = (next(r for r in found.accumulations if getattr(r, w)) for w in ("installed", "chosen"))
    sentence = page.decision(found)
    assert (
        units.duration(own.measured_seconds) in sentence
        and units.duration(chosen.measured_seconds) in sentence
    )
    assert "to an accumulation of 4 micro-steps" in sentence
    assert all(row.way in words for row in found.accumulations)
    assert "only what lies left of the band is a gain" not in words


def test_the_step_is_on_the_page_where_one_was_decided(profile: Profile, parsed: Page) -> None:
    """Its reasons, every way with its verdict, the parts of DeepSpeed's own; nothing of it in an older profile."""
    assert profile.step is not None
    words = _words(parsed)
    assert all(" ".join(reason.split()) in words for reason in profile.step.reasons)
    assert all(row.name in words and row.said in words for row in step_rows(profile))
    assert "DeepSpeed's own: scale gradients" in words
    older = structs.replace(profile, step=None, step_rates=None)
    assert "The optimizer step" not in _words(Page(page.html([("older", older)])))


def test_every_alternative_has_its_verdict(profile: Profile, parsed: Page) -> None:
    """The fold lists each candidate and each sequence of DeepSpeed's own."""
    many = len(profile.candidates) + len(profile.baselines)
    assert f"All {many} alternatives" in _words(parsed)
    assert sum(tag == "tr" for tag, _ in parsed.elements) > many


def test_the_raw_numbers_hold_the_whole_profile(profile: Profile, text: str) -> None:
    """The JSON behind the fold is the profile itself, every sample included."""
    import html

    raw = html.unescape(text[text.index("<pre") :].split(">", 1)[1].split("</pre>")[0])
    assert json.loads(raw) == json.loads(json.dumps(to_plain(profile)))


def test_several_profiles_stand_side_by_side(profile: Profile) -> None:
    """Each has a row with a link to its own section, and no id occurs twice."""
    other = make_profile(choice=make_choice(gain=1.0))
    both = Page(page.html([("a", profile), ("b", other)]))
    links = [attrs["href"] for tag, attrs in both.elements if tag == "a"]
    assert "#profile-1" in links and "#profile-2" in links
    assert {"profile-1", "profile-2"} <= set(both.ids())
    assert "keep DeepSpeed's own" in both.text


def test_a_users_config_is_what_is_changed(profile: Profile) -> None:
    """With a config the diff starts from the values in it."""
    mine = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    changes = page.diff(profile, mine).changes
    assert [(c.before, c.after) for c in changes if c.key.endswith("offload_optimizer.pin_memory")] == [
        (True, False)
    ]


def test_the_ceiling_is_the_links_own(profile: Profile) -> None:
    """PCIe 5 x16 carries 63 GB/s one way; a device that tells no link has no ceiling."""
    found = page.ceiling(profile)
    assert found is not None and found.gbps == pytest.approx(63.0, abs=0.1) and found.name == "PCIe 5 x16"
    silent = structs.replace(profile.device, link_generation=None)
    assert page.ceiling(structs.replace(profile, device=silent)) is None


def test_words_of_a_profile_cannot_become_markup(profile: Profile) -> None:
    """A name with markup in it is shown, not run."""
    evil = "<script>alert(1)</script>&"
    named = structs.replace(profile, host=structs.replace(profile.host, name=evil), warnings=(evil,))
    made = page.html([(evil, named)])
    assert "<script>alert(1)" not in made and "&lt;script&gt;alert(1)" in made


# -- how it is made -------------------------------------------------------------------------------


def test_every_tag_closes_and_no_id_occurs_twice(parsed: Page) -> None:
    """The markup is well formed."""
    assert parsed.unclosed == [] and parsed.open == []
    assert len(parsed.ids()) == len(set(parsed.ids()))


def test_the_page_names_nothing_outside_itself(parsed: Page, text: str) -> None:
    """No address is loaded, and the policy forbids it."""
    loads = ("src", "srcset", "action", "data", "poster")
    found = [attrs[name] for _, attrs in parsed.elements for name in loads if name in attrs]
    found += [a["href"] for t, a in parsed.elements if t in ("link", "image", "use") and "href" in a]
    assert [each for each in found if not each.startswith("data:")] == []
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text.replace("url(#", "")


def test_headings_go_down_one_level_at_a_time(parsed: Page) -> None:
    """One h1, and no level is left out: what a screen reader jumps by."""
    levels = [
        int(tag[1]) for tag, _ in parsed.elements if len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_mark_of_a_chart_says_its_values(profile: Profile, parsed: Page) -> None:
    """Each point that was drawn has its numbers as words, for screen readers and for the pointer."""
    said = {attrs.get("aria-label", "") for _, attrs in parsed.elements}
    for each in profile.transfers:
        name = bandwidth.series_of(each)
        assert any(f"{name}, {units.size(each.bytes)}: {units.rate(each.gbps)}" in one for one in said)
    assert any("staged, cast device" in one and "measured" in one for one in said)


def _luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [drawing.LIGHT, drawing.DARK], ids=["light", "dark"])
def test_every_colour_has_contrast(scheme: dict[str, str]) -> None:
    """Text has 4.5 to 1 against the paper; curves are read as text is, so they have it too."""
    for role, colour in scheme.items():
        if role not in ("paper", "grid"):
            assert _contrast(colour, scheme["paper"]) >= 4.5, role
    assert set(scheme) == set(drawing.LIGHT)


def test_curves_differ_by_more_than_colour(profile: Profile) -> None:
    """Each curve has a shape and a dash of its own."""
    spec = bandwidth.bandwidth(profile, "d2h", ceiling=None, width=300, colours=drawing.LIGHT)
    assert spec is not None
    encodings = [layer["encoding"] for layer in spec["layer"]]
    for channel in ("shape", "strokeDash"):
        values = next(each[channel]["scale"]["range"] for each in encodings if channel in each)
        assert len({str(value) for value in values}) == len(values) == 3


def test_a_profile_with_next_to_nothing_in_it_has_a_page(profile: Profile) -> None:
    """No candidate measured, no curve, no baseline: still a page, with what there is."""
    bare = structs.replace(profile, candidates=(), baselines=(), transfers=profile.transfers[:1])
    assert Page(page.html([("bare", bare)])).unclosed == []


# -- the verb -------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, profile: Profile) -> Path:
    """A store with one profile."""
    Store(tmp_path / "store").save(profile)
    return tmp_path / "store"


def _run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, [str(each) for each in arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_verb_writes_one_page_and_says_where(tmp_path: Path, stored: Path) -> None:
    """Nothing on stdout; stderr names the file."""
    file = tmp_path / "page.html"
    assert _run("report", "--cache", stored, "-o", file) == (0, "", f"written: {file}\n")
    assert file.read_text().startswith("<!doctype html>")


def test_with_json_stdout_is_one_document(tmp_path: Path, stored: Path, profile: Profile) -> None:
    """The file and each decision."""
    code, out, _ = _run("report", "--cache", stored, "-o", tmp_path / "p.html", "--json")
    document = json.loads(out)
    assert code == 0 and document["output"] == str(tmp_path / "p.html")
    assert document["profiles"][0]["decision"] == page.decision(profile)


def test_a_picture_is_a_png(tmp_path: Path, stored: Path) -> None:
    """--png writes a picture and no page."""
    code, _, _ = _run("report", "--cache", stored, "--png", tmp_path / "p.png", "-o", tmp_path / "p.html")
    assert code == 0 and (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "p.html").exists()


def test_what_probe_and_simulate_print_can_be_shown(tmp_path: Path, profile: Profile) -> None:
    """One document, or the several of `simulate --all --json`."""
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    one.write_text(json.dumps({**to_plain(profile), "virtual_seconds": 1.0}))
    several.write_text(json.dumps({"machines": [to_plain(profile)] * 2}))
    code, out, _ = _run("report", one, several, "-o", tmp_path / "p.html", "--json")
    assert code == 0 and len(json.loads(out)["profiles"]) == 3
    assert _run("show", one)[0] == 0
    code, _, problem = _run("show", several)
    assert code == 1 and "holds 2 profiles" in problem


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": 1, "host": 3}', "not a valid Profile"),
        ('{"models": []}', "is JSON but no profile of schema 1"),
        ("no profile", "has no schema"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_words(tmp_path: Path, content: str, said: str) -> None:
    """Exit 1 with what was found and what to do."""
    file = tmp_path / "x.json"
    file.write_text(content)
    code, out, problem = _run("report", file, "-o", tmp_path / "p.html")
    assert (code, out) == (1, "") and said in problem and "autotune-offload" in problem


def test_a_machines_description_is_told_from_a_profile(tmp_path: Path) -> None:
    """It says which command makes a profile of it."""
    described = places.config_file("machines", "gh200.yaml")
    code, _, problem = _run("report", described, "-o", tmp_path / "p.html")
    assert code == 1 and "simulate" in problem and "--json" in problem


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, stored: Path) -> None:
    """Exit 1, and what to do."""
    code, _, problem = _run("report", "--cache", stored, "-o", tmp_path / "no" / "p.html")
    assert code == 1 and "cannot write" in problem and "name another file" in problem
