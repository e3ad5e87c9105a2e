"""What a release rests on: the files parse, say the same as the package, and name commands that exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import CHECKOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")

WORKFLOW = CHECKOUT / ".github" / "workflows" / "release.yml"
CI = CHECKOUT / ".github" / "workflows" / "ci.yml"
MAKEFILE = (CHECKOUT / "Makefile").read_text(encoding="utf-8")


def read(file: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    """The section of that name."""
    found: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return found


def commands(jobs: Any) -> list[str]:
    """Every line that the steps of a workflow run."""
    return [
        line for job in jobs.values() for step in job["steps"] for line in step.get("run", "").splitlines()
    ]


def test_a_tag_is_tested_before_it_is_built_and_built_before_it_is_published() -> None:
    """In that order, and on nothing but a tag of a version."""
    found = read(WORKFLOW)
    assert found[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    jobs = found["jobs"]
    assert (jobs["build"]["needs"], jobs["wheel"]["needs"]) == ("test", "test")
    assert jobs["publish"]["needs"] == ["build", "wheel"]


def test_what_is_published_has_the_passes_for_two_architectures_and_a_pure_wheel() -> None:
    """Each artifact has a name of its own, and all of them are fetched; the variable is the build hook's."""
    jobs = read(WORKFLOW)["jobs"]
    runners = jobs["wheel"]["strategy"]["matrix"]["runner"]
    assert len(runners) == 2 and sum("arm" in runner for runner in runners) == 1
    variables = {
        name for job in ("build", "wheel") for step in jobs[job]["steps"] for name in step.get("env", {})
    }
    assert variables == {"AUTOTUNE_OFFLOAD_WHEEL"}
    assert 'VARIABLE = "AUTOTUNE_OFFLOAD_WHEEL"' in (CHECKOUT / "hatch_build.py").read_text(encoding="utf-8")
    uploaded = [step["with"]["name"] for job in ("build", "wheel") for step in jobs[job]["steps"]
                if "upload-artifact" in step.get("uses", "")]  # fmt: skip
    assert len(set(uploaded)) == 2 and all(name.startswith("dist") for name in uploaded)
    (fetched,) = (step["with"] for step in jobs["publish"]["steps"] if "download-artifact" in step["uses"])
    assert (fetched["pattern"], fetched["merge-multiple"]) == ("dist*", True)


def test_only_the_job_that_publishes_may_identify_itself() -> None:
    """Trusted publishing with attestations, and no secret anywhere."""
    found = read(WORKFLOW)
    assert found["permissions"] == {}
    jobs = found["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert {name for name, job in jobs.items() if "id-token" in job["permissions"]} == {"publish"}
    (published,) = (step for step in jobs["publish"]["steps"] if "pypi-publish" in step["uses"])
    assert published["with"] == {"attestations": True}
    assert "secrets." not in WORKFLOW.read_text(encoding="utf-8")


def test_the_workflow_runs_what_exists() -> None:
    """Targets of the Makefile, and modules that the set-up installs."""
    lines = commands(read(WORKFLOW)["jobs"])
    targets = [line.split()[1] for line in lines if line.startswith("make ")]
    assert targets == ["test"]
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    modules = {line.split()[2] for line in lines if line.startswith("python -m ")}
    assert modules == {"pip", "hatchling"}


def test_every_version_of_python_that_is_named_is_run() -> None:
    """The classifiers are what CI has, the oldest is required, and what CI runs is there."""
    jobs = read(CI)["jobs"]
    full = [
        step["with"]["python-version"] for step in jobs["everything"]["steps"] if "setup-python" in str(step)
    ]
    versions = [*full, *jobs["quick"]["strategy"]["matrix"]["python"]]
    named = [found[1] for each in project()["classifiers"] if (found := re.search(r":: (3\.\d+)$", each))]
    assert sorted(versions, key=_number) == named
    assert project()["requires-python"] == f">={named[0]}"
    lines = commands(jobs)
    assert lines == ["bash .ci/run", "make test-quick"]
    assert (CHECKOUT / ".ci" / "run").exists() and "\ntest-quick: lint " in MAKEFILE


def _number(version: str) -> int:
    return int(version.removeprefix("3."))


def test_the_tag_is_held_against_lines_that_are_there() -> None:
    """The patterns that the workflow looks for fit what the files have today."""
    version = project()["version"]
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert f'version = "{version}"' in text
    checked = "\n".join(commands(read(WORKFLOW)["jobs"]))
    assert 'version = \\"$version\\"' in checked and "CHANGELOG.md" in checked
    assert re.search(r"^## \[", (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_citation_says_what_the_package_says() -> None:
    """Name, version, licence and keywords."""
    cited, ours = read(CHECKOUT / "CITATION.cff"), project()
    assert cited["cff-version"] == "1.2.0" and cited["authors"] and cited["message"]
    assert (cited["title"], cited["version"], cited["license"]) == (
        ours["name"],
        ours["version"],
        ours["license"],
    )
    assert cited["keywords"] == ours["keywords"]


def test_pre_commit_runs_what_lint_runs() -> None:
    """Each command of `make lint`, in its order, and none besides."""
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    wanted = [shlex.split(line.replace("$(BIN)", ".venv/bin")) for line in recipe[1].splitlines()]
    (local,) = read(CHECKOUT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [shlex.split(hook["entry"]) for hook in local["hooks"]] == wanted
    assert all(hook["pass_filenames"] is False and hook["language"] == "system" for hook in local["hooks"])


def test_the_security_page_names_files_that_exist() -> None:
    """The module that decides from where code is loaded, and the folder's name there."""
    page = (CHECKOUT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(autotune_offload/[\w/]+\.py)`", page)
    assert named and all((CHECKOUT / name).is_file() for name in named)
    assert '"kernels"' in (CHECKOUT / "autotune_offload" / "places.py").read_text(encoding="utf-8")
