"""Files that are no ds_config and parse all the same: what they are, and what to name instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune_offload.config.reading import followed, read
from autotune_offload.errors import ConfigError
from tests.config.test_reading import CASES

ACCELERATE_FIELDS = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: cpu
  zero_stage: 3
distributed_type: DEEPSPEED
num_processes: 1
"""
ARCTIC = """
micro_batch_size: 2
model:
  type: liger
  name_or_path: some/model
deepspeed:
  zero_optimization:
    stage: 3
    offload_optimizer:
      device: cpu
"""
RECIPE = "### model\nmodel_name_or_path: m\n\n### method\nstage: sft\nlora: true\ndeepspeed: ds/z3.json\nlist:\n- a\n"
WRAPPER = json.dumps(
    {"student": {"model": "m"}, "training": {"batch": 1}, "deepspeed_config": "configs/ds.json"}
)
PLAIN_YAML = "train_batch_size: 8\nzero_optimization:\n  stage: 3\n"
MODEL = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64})
FSDP = json.dumps({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}})


@pytest.mark.parametrize(
    ("name", "text", "what", "way_out"),
    [
        ("a.yaml", ACCELERATE_FIELDS, "accelerate's own configuration", "name it in deepspeed_config_file"),
        ("a.yml", ARCTIC, "a framework or a recipe", 'holds a ds_config under "deepspeed"'),
        ("a.yaml", RECIPE, "a framework or a recipe", 'it names is "ds/z3.json"'),
        ("a.json", WRAPPER, "a framework or a recipe", 'it names is "configs/ds.json"'),
        ("a.yaml", PLAIN_YAML, "is YAML", "write it as JSON"),
        ("config.json", MODEL, "a model's config.json", "name the ds_config itself"),
        ("a.json", FSDP, "accelerate's own configuration", "deepspeed_config_file"),
    ],
    ids=["accelerate's fields", "ArcticTraining", "a recipe", "a wrapper", "YAML", "a model", "FSDP"],
)
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, name: str, text: str, what: str, way_out: str
) -> None:
    """Hjson would take each; none is read as a ds_config."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / name)
    assert what in str(refused.value) and way_out in str(refused.value)
    assert followed(tmp_path / name) == (tmp_path / name, ())


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_ds_config_is_never_taken_for_something_else(path: Path) -> None:
    """Every shape of the examples, comments and missing braces included."""
    assert read(path)
    assert followed(path) == (path, ())


@pytest.mark.parametrize(
    "text",
    [
        "train_batch_size: 8\nzero_optimization:\n{\n  stage: 3\n}\n",
        "train_batch_size: 8\nzero_optimization: {stage: 3}\n",
        '{"autotune_offload": {"enabled": false}}',
        '{"deepspeed_config": "x.json", "zero_optimization": {"stage": 3}}',
        "{}",
    ],
)
def test_hjson_without_braces_stays_a_ds_config(text: str) -> None:
    """As DeepSpeed reads it."""
    assert isinstance(read(text if "\n" in text or text.startswith("{") else text + "\n"), dict)


@pytest.mark.parametrize("where", ["", "configs"])
def test_the_ds_config_that_is_named_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where the job starts, beside the file, or above it."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text('{"train_batch_size": 8}')
    wrapper = tmp_path / where / "run.json"
    wrapper.write_text(WRAPPER)
    monkeypatch.chdir(tmp_path / "configs")
    found, said = followed(wrapper)
    assert read(found) == {"train_batch_size": 8}
    assert "names" in said[0] and str(wrapper) in said[0]


def test_files_that_name_each_other_end(tmp_path: Path) -> None:
    """A circle is left after a few steps, and refused."""
    (tmp_path / "a.json").write_text('{"deepspeed_config": "b.json"}')
    (tmp_path / "b.json").write_text('{"deepspeed_config": "a.json"}')
    with pytest.raises(ConfigError, match="no DeepSpeed configuration"):
        read(followed(tmp_path / "a.json")[0])


def test_a_template_that_is_no_json_yet_says_so() -> None:
    """Where the placeholder breaks the syntax."""
    with pytest.raises(ConfigError, match=r"a template that nobody filled in: \{\{ batch \}\}"):
        read('{\n "train_batch_size": {{ batch }},\n "bf16": {"enabled": true}\n}')
