"""A model without weights, built by `transformers` from its config.json.

No formula keeps up with the architectures that are published: only the model's own code knows its shapes, what is
tied and what is frozen. Nothing is fetched, and no code but that of the installed `transformers` runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

_log = logging.getLogger(__name__)

INSTALL = 'install transformers (`pip install "autotune-offload[frameworks]"`)'

_TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModel",
)
"""Asked in this order where the config names no class of its own."""

_LEFT_OUT = frozenset(
    {
        "auto_map",
        "quantization_config",
        "attn_implementation",
        "_attn_implementation",
        "use_pretrained_backbone",
    }
)
"""What names code or weights from elsewhere, and no shape of what is trained."""


def built(described: Mapping[str, Any]) -> Any:
    """The module that a config.json describes, on the meta device; a sentence where there is none.

    Takes the import of `transformers`, a few seconds, and less than a second more.
    """
    kind = described.get("model_type")
    if not isinstance(kind, str):
        return "it names no model_type"
    try:
        import torch
        import transformers
    except ImportError:
        return f"transformers is not installed here, which knows every architecture; {INSTALL}"
    values = {name: value for name, value in described.items() if name not in _LEFT_OUT | {"model_type"}}
    try:
        with _offline_and_quiet(), torch.device("meta"):
            if kind not in transformers.CONFIG_MAPPING:
                return f'transformers {transformers.__version__} does not know the model type "{kind}"'
            config = transformers.AutoConfig.for_model(kind, **values)
            return _class_for(config, described.get("architectures"))(config)
    except Exception as error:  # somebody else's code, given a file that nobody has checked
        words = " ".join(str(error).split())[:200]
        _log.debug("transformers could not build this config.json", exc_info=True)
        return f"transformers {transformers.__version__} cannot build it ({type(error).__name__}: {words})"


def _class_for(config: Any, named: object) -> Any:
    """The class that the file names, else the first task that knows this kind of config.

    Raises:
        LookupError: none does.
    """
    import transformers

    name = named[0] if isinstance(named, list) and named else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found._from_config  # type: ignore[attr-defined]  # PreTrainedModel is untyped here
    for task in _TASKS:
        family = getattr(transformers, task, None)
        if family is not None and type(config) in family._model_mapping:
            return family.from_config
    raise LookupError(f"no class of it is a model of {type(config).__name__}")


@contextlib.contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """Neither the hub nor the terminal hears of this."""
    import transformers
    from huggingface_hub import constants

    level = transformers.logging.get_verbosity()
    offline = constants.HF_HUB_OFFLINE
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        transformers.logging.set_verbosity(level)
