"""What invalidates a stored profile and what is only recorded: the table, the key, and the page that shows it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import structs

from autotune_offload.profiles.environment import INVALIDATES, RECORDED, Environment, release
from autotune_offload.records import (
    DeviceIdentity,
    HostFacts,
    Limit,
    Limits,
    Profile,
    Settings,
    Software,
    fingerprint_key,
)
from tests import CHECKOUT
from tests.factories import make_profile

PAGE = CHECKOUT / "docs" / "cache.md"
PARTS: dict[str, Any] = {"host": HostFacts, "device": DeviceIdentity, "software": Software, "limits": Limits}


def test_the_page_holds_the_table_of_the_code() -> None:
    """Row for row, in its order, with its words."""
    rows = re.findall(r"^\| `([^`]+)` \| (invalidates|recorded) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        *((name, "invalidates", why) for name, (_, why) in INVALIDATES.items()),
        *((name, "recorded", why) for name, why in RECORDED.items()),
    ]


def test_every_fact_of_a_profile_is_in_the_table() -> None:
    """A new field of host, device, software or limits must be put on one side, and stands on one side only."""
    facts = {f"{part}.{field.name}" for part, kind in PARTS.items() for field in structs.fields(kind)}
    assert set(PARTS) <= {field.name for field in structs.fields(Profile)}
    derived = {
        "device.link",
        "limits.memlock_class",
        "software.sequence",
        "schema",
        "workload",
        "layout",
        "fixed",
    }
    assert set(INVALIDATES) | set(RECORDED) == facts | derived
    assert not set(INVALIDATES) & set(RECORDED)


def environment() -> Environment:
    """A host with a memlock limit, and nothing fixed."""
    profile = make_profile()
    memlock = Limit(name="memlock", bytes=1 << 26, source="ulimit -l", raise_by="raise it")
    limits = structs.replace(profile.limits, bounds=(*profile.limits.bounds, memlock))
    return Environment(
        host=profile.host,
        device=profile.device,
        software=profile.software,
        limits=limits,
        workload=profile.workload,
        settings=Settings(),
    )


def key_with(**changes: object) -> str:
    """The key after changing fields, each given as part__field."""
    here = environment()
    for name, value in changes.items():
        part, _, field = name.partition("__")
        changed = structs.replace(getattr(here, part), **{field: value})
        here = structs.replace(here, **{part: changed})
    return fingerprint_key(here.fingerprint())


@pytest.mark.parametrize(
    "change",
    [
        {"device__kind": "xpu"},
        {"device__name": "NVIDIA H100"},
        {"device__capability": "9.1"},
        {"device__memory_bytes": 1 << 36},
        {"device__mig_slice": "1g.10gb"},
        {"device__link_generation": 4},
        {"device__link_width": 8},
        {"device__pin_backend": "native"},
        {"device__settings": "pinned_use_cuda_host_register:true"},
        {"host__cpu_model": "another"},
        {"host__affinity_cpus": 8},
        {"host__numa_bound": False},
        {"limits__bounds": ()},
        {"software__torch": "2.14.0"},
        {"software__deepspeed": "0.20.0"},
        {"workload__dtype": "float16"},
        {"workload__world_size": 16},
        {"workload__accumulation_steps": 2},
        {"settings__accumulate": "host"},
        {"settings__path": "direct"},
        {"settings__max_pinned_bytes": 1 << 30},
        {"software__deepspeed": "0.19.4"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_invalidates_a_profile_changes_the_key(change: dict[str, object]) -> None:
    """Each of these may change what is fastest."""
    assert key_with(**change) != key_with()


@pytest.mark.parametrize(
    "change",
    [
        {"host__name": "another"},
        {"host__ram_bytes": 1},
        {"limits__available_bytes": 1},
        {"limits__pinnable_bytes": 1},
        {"device__index": 3},
        {"software__torch": "2.13.9"},
        {"software__deepspeed": "0.19.9"},
        {"software__python": "3.12.1"},
        {"workload__source": "another"},
        {"settings__path": "deepspeed"},
        {"settings__budget_seconds": 9.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_by_itself_does_not_change_the_key(change: dict[str, object]) -> None:
    """Names, free memory, patch releases and words."""
    assert key_with(**change) == key_with()


@pytest.mark.parametrize(
    ("kind", "one", "other", "same"),
    [("cuda", 2, 3, False), ("cuda", 4, 32, True), ("cpu", 1, 4, True)],
)
def test_micro_steps_count_as_far_as_they_are_timed(kind: str, one: int, other: int, same: bool) -> None:
    """More than four are timed as four, and on the CPU they are added up in place."""
    keys = [key_with(device__kind=kind, workload__accumulation_steps=steps) for steps in (one, other)]
    assert (keys[0] == keys[1]) is same


def test_the_host_name_is_no_part_of_a_fingerprint() -> None:
    """Neither as a field nor in a value."""
    here = environment()
    assert here.host.name not in str(here.fingerprint())


def test_release_drops_local_parts() -> None:
    """Builds of one release are one version."""
    assert release("0.19.8+cu130") == (0, 19, 8)
    assert release("0.20.0.dev1") == (0, 20, 0)
