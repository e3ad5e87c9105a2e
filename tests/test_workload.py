"""What a training step moves, from a module, a Hugging Face config.json or a count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune_offload import workload
from autotune_offload.errors import ConfigError
from tests import DATA
from tests.factories import make_workload

CONFIGS = DATA / "hf_configs"

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "gpt2": 124_439_808,
    "gemma_2b": 2_506_172_416,
}
"""Parameters of the published weights, tied ones counted once: what a formula counts too."""

PUBLISHED_ONLY_BUILT = {
    "mixtral_8x7b": 46_702_792_704,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "t5_small": 60_506_624,
}
"""The same of what only its own code knows."""

RECENT = {
    "glm4_5_air": 106e9,
    "gpt_oss_20b": 20.9e9,
    "deepseek_v3": 671e9,
    "qwen3_next_80b": 80e9,
    "jamba_mini": 52e9,
    "llama4_maverick": 400e9,
    "ernie4_5_21b_a3b": 21.8e9,
    "bert_large": 335e6,
}
"""Parameters by the authors' own words, for configs in `data/hf_configs/recent.json`."""


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.fixture
def with_transformers() -> Any:
    """Skips where it is not installed."""
    return pytest.importorskip("transformers", reason="counts by the model's own code")


def config_file(folder: Path, described: dict[str, Any]) -> Path:
    """A config.json that holds this."""
    file = folder / "config.json"
    file.write_text(json.dumps(described))
    return file


class Partitioned(torch.nn.Module):
    """A module as zero.Init leaves it: emptied parameters, the full size in ds_numel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        vars(self.weight)["ds_numel"] = 1000


def test_module_gives_each_rank_its_share_rounded_up() -> None:
    """Every parameter is split by itself, and the last rank's padding counts."""
    found = workload.from_module(torch.nn.Linear(10, 7), world_size=4, accumulation_steps=2)
    assert found.partitions == ((18, 1), (2, 1))
    assert found.parameters == ((70, 1), (7, 1))
    assert (found.dtype, found.world_size, found.accumulation_steps) == ("float32", 4, 2)
    assert found.source == "module Linear"


def test_frozen_parameters_are_fetched_but_have_no_gradients() -> None:
    """They count among the parameters and not among the partitions, and give no dtype."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False).half(), torch.nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    found = workload.from_module(model)
    assert found.partitions == ((16, 1),)
    assert found.parameters == ((64, 1), (16, 1))
    assert found.dtype == "float32"


def test_tied_parameters_count_once() -> None:
    """A weight that two layers share is offloaded once."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert workload.from_module(model).partitions == ((64, 1),)


def test_parameters_of_zero_init_count_in_full() -> None:
    """Their tensors are empty; ds_numel holds the size."""
    found = workload.from_module(Partitioned(), world_size=2)
    assert found.parameters == ((1000, 1),)
    assert found.partitions == ((500, 1),)
    assert found.dtype == "bfloat16"


def test_a_module_without_parameters_is_refused() -> None:
    """The error names the module's class."""
    with pytest.raises(ConfigError, match="ReLU has no parameters"):
        workload.from_module(torch.nn.ReLU())


def test_a_frozen_module_counts_as_if_it_were_trained() -> None:
    """For inference the same parameters lie on the host and are fetched."""
    frozen, trained = torch.nn.Linear(4, 2).requires_grad_(False), torch.nn.Linear(4, 2)
    assert workload.from_module(frozen, world_size=2) == workload.from_module(trained, world_size=2)


def test_a_dtype_that_is_not_offloaded_is_refused() -> None:
    """The error says which are."""
    with pytest.raises(ConfigError, match='"float64" are not offloaded; expected one of bfloat16, float16'):
        workload.from_module(torch.nn.Linear(2, 2).double())


@pytest.mark.parametrize(("ranks", "steps"), [(0, 1), (1, 0)])
def test_fewer_than_one_rank_or_step_is_refused(ranks: int, steps: int) -> None:
    """Both must be at least 1."""
    with pytest.raises(ConfigError, match="must be at least 1"):
        workload.from_parameter_count(10**6, world_size=ranks, accumulation_steps=steps)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("without_transformers")
def test_a_formula_gives_the_published_parameter_count(name: str) -> None:
    """Exactly: every matrix, norm and bias of the architecture is there."""
    found = workload.from_hf_config(CONFIGS / f"{name}.json")
    assert found.parameter_elements == PUBLISHED[name]
    assert found.elements == found.parameter_elements
    assert found.source.endswith(", by a formula")


@pytest.mark.slow
@pytest.mark.usefixtures("with_transformers")
@pytest.mark.parametrize("name", PUBLISHED | PUBLISHED_ONLY_BUILT)
def test_the_models_own_code_gives_the_published_parameter_count(name: str) -> None:
    """Experts, encoders and towers among them, tied weights once."""
    found = workload.from_hf_config(CONFIGS / f"{name}.json")
    assert found.parameter_elements == (PUBLISHED | PUBLISHED_ONLY_BUILT)[name]


@pytest.mark.slow
@pytest.mark.usefixtures("with_transformers")
@pytest.mark.parametrize("name", RECENT)
def test_recent_models_are_counted_within_two_percent(tmp_path: Path, name: str) -> None:
    """Of what their authors say; a formula had GLM-4.5-Air at 12 of its 106 billion."""
    described = json.loads((CONFIGS / "recent.json").read_text())[name]
    found = workload.from_hf_config(config_file(tmp_path, described))
    assert found.parameter_elements == pytest.approx(RECENT[name], rel=0.02)


@pytest.mark.parametrize("name", RECENT)
@pytest.mark.usefixtures("without_transformers")
def test_what_no_formula_counts_is_refused_without_transformers(tmp_path: Path, name: str) -> None:
    """A wrong size would decide as firmly as a right one; the error says what to install."""
    described = json.loads((CONFIGS / "recent.json").read_text())[name]
    with pytest.raises(ConfigError, match=r"sizes are not known: transformers is not installed.*--params"):
        workload.from_hf_config(config_file(tmp_path, described))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_routed_experts", 8),
        ("moe_layers", [1]),
        ("mamba_d_state", 16),
        ("ssm_state_size", 16),
        ("hybrid_override_pattern", "M*"),
        ("kv_lora_rank", 512),
        ("latent_size", 64),
        ("vision_config", {"hidden_size": 64}),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_a_key_that_is_not_understood_is_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    """Even in a config of a type that is known; where it is 0 or empty, it adds nothing."""
    plain = json.loads((CONFIGS / "llama3_8b.json").read_text())
    with pytest.raises(ConfigError, match=rf"no formula here counts \({key}\)"):
        workload.from_hf_config(config_file(tmp_path, {**plain, key: value}))
    without = workload.from_hf_config(config_file(tmp_path, {**plain, key: type(value)()}))
    assert without.parameter_elements == PUBLISHED["llama3_8b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "head_dim": 24, "tie_word_embeddings": True},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"model_type": "gemma"},
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4},
    ],
    ids=str,
)
def test_the_formula_counts_what_the_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_transformers: Any, changes: dict[str, Any]
) -> None:
    """Parameter by parameter, for every model type that it takes."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    file = config_file(tmp_path, {**sizes, "intermediate_size": 96, "vocab_size": 500, **changes})
    if changes["model_type"] == "gpt2":
        file = config_file(tmp_path, {**changes, "vocab_size": 500})
    built = workload.from_hf_config(file)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert workload.from_hf_config(file).parameters == built.parameters


@pytest.mark.slow
@pytest.mark.usefixtures("with_transformers")
def test_no_code_and_no_weights_of_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json that names code in a repository is built from what is installed, with no network."""

    def connect(*args: object) -> None:
        raise AssertionError(f"the network was asked: {args}")

    monkeypatch.setattr("socket.socket.connect", connect)
    described = json.loads((CONFIGS / "llama3_8b.json").read_text())
    remote = {"auto_map": {"AutoModelForCausalLM": "someone/model--modeling.Model"}, "_name_or_path": "a/b"}
    found = workload.from_hf_config(config_file(tmp_path, {**described, **remote}))
    assert found.parameter_elements == PUBLISHED["llama3_8b"]
    unknown = {**described, **remote, "model_type": "never-seen"}
    with pytest.raises(ConfigError, match='does not know the model type "never-seen"'):
        workload.from_hf_config(config_file(tmp_path, unknown))


@pytest.mark.slow
@pytest.mark.usefixtures("with_transformers")
def test_what_transformers_cannot_build_is_told(tmp_path: Path) -> None:
    """Its own error is in ours; nothing else comes of it."""
    with pytest.raises(ConfigError, match=r"(?s)transformers [\d.]+ cannot build it \(.*--params"):
        workload.from_hf_config(config_file(tmp_path, {"model_type": "mixtral", "num_local_experts": "many"}))


def test_hf_config_is_found_in_its_folder(tmp_path: Path) -> None:
    """A folder stands for the config.json in it."""
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    found = workload.from_hf_config(tmp_path, world_size=8, dtype="float16")
    assert found.source.startswith("config.json (gpt2)")
    assert found.partitions[0] == (-(-50257 * 768 // 8), 1)
    assert found.dtype == "float16"


@pytest.mark.slow
@pytest.mark.usefixtures("with_transformers")
def test_every_part_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    """The tower for pictures beside the text model."""
    text = {"model_type": "gemma", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 72, "num_hidden_layers": 1}
    described = {"model_type": "paligemma", "text_config": text, "vision_config": vision}
    two = workload.from_hf_config(config_file(tmp_path, described)).parameter_elements
    deeper = {**described, "vision_config": {**vision, "num_hidden_layers": 2}}
    assert workload.from_hf_config(config_file(tmp_path, deeper)).parameter_elements > two


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds list, expected a JSON object"),
        ("{", "is not a readable JSON file"),
        ('{"model_type": "gpt2", "n_embd": 64}', "num_hidden_layers or n_layer.*give the model's size"),
        ('{"model_type": "gpt2", "n_embd": true, "n_layer": 2}', "no positive .* n_embd"),
        ('{"n_embd": 64, "n_layer": 2}', "a model of no named type.*it names no model_type"),
        ('{"kv_lora_rank": 512, "hidden_size": 64}', "kv_lora_rank.*--params"),
        ((CONFIGS / "t5_small.json").read_text(), "an encoder-decoder.*--params"),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_a_config_that_says_too_little_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The error names what is missing, and the way out."""
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        workload.from_hf_config(file)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    """The error says where it looked."""
    with pytest.raises(ConfigError, match=r'no such file ".*absent"'):
        workload.from_hf_config(tmp_path / "absent")


@given(st.floats(5, 12).map(lambda power: int(10**power)))
def test_a_count_is_met_within_the_promised_band(count: int) -> None:
    """Within 15 % of what was asked for, from 1e5 to 1e12."""
    found = workload.from_parameter_count(max(count, 100_000))
    assert abs(found.parameter_elements / max(count, 100_000) - 1) <= 0.15


def test_too_small_a_count_is_refused() -> None:
    """No decoder is that small."""
    with pytest.raises(ConfigError, match=r"99,999 parameters are too few.*at least 100,000"):
        workload.from_parameter_count(99_999)


def test_middle_is_the_size_that_half_of_all_elements_lie_in_or_above() -> None:
    """Many small parameters do not hide the few that hold the elements."""
    assert workload.middle_elements([(100, 1), (60, 1), (1, 30)]) == 100
    assert workload.middle_elements([(100, 1), (60, 2), (1, 30)]) == 60
    with pytest.raises(ValueError, match="no sizes"):
        workload.middle_elements([])


def test_class_is_stable_where_only_words_differ() -> None:
    """Source and accumulation steps do not change what is chosen; a few elements do not either."""
    one = make_workload()
    same = make_workload(source="elsewhere", accumulation_steps=4, partitions=(*one.partitions, (1, 3)))
    assert workload.workload_class(one) == workload.workload_class(same)
    assert workload.workload_class(one) == "bfloat16 world=8 total=2^24 partition=2^18"


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float16"}, {"world_size": 4}, {"partitions": ((1 << 22, 4),)}, {"partitions": ((8, 9),)}],
)
def test_class_tells_apart_what_may_need_another_choice(changes: dict[str, object]) -> None:
    """Dtype, ranks, amount and size of the partitions."""
    assert workload.workload_class(make_workload(**changes)) != workload.workload_class(make_workload())
