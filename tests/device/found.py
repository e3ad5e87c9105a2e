"""What the parts would find on an accelerator where every claim holds."""

from __future__ import annotations

from typing import Any

MIB, GIB = 1 << 20, 1 << 30
ELEMENTS = 64 * MIB


def _link(bytes_each: int, seconds: float, hidden: float, beside: float) -> dict[str, Any]:
    return {
        "copies": 16,
        "bytes": bytes_each * ELEMENTS,
        "seconds": seconds,
        "hidden_seconds": hidden,
        "hideable_seconds": min(seconds, beside),
        "beside_seconds": beside,
    }


NOTHING = {
    "copies": 0,
    "bytes": 0,
    "seconds": 0.0,
    "hidden_seconds": 0.0,
    "hideable_seconds": 0.0,
    "beside_seconds": 0.02,
}


def _way(name: str, path: str | None, cast: str | None, hidden: float) -> dict[str, Any]:
    each = 2 if cast == "host" else 6
    back = 2 if path is None else 0
    return {
        "name": name,
        "path": path,
        "cast": cast,
        "host_threads": 0,
        "elements": ELEMENTS,
        "rows": 8192,
        "reported_link_bytes": None if path is None else (each + back) * ELEMENTS,
        "reported_stock_link_bytes": None if path is None else 8 * ELEMENTS,
        "step": "DeepSpeed's own" if path is None else "the pass",
        "file": "trace.json",
        "backward_seconds": 0.03,
        "step_seconds": 0.05,
        "kernels": 100,
        "gradients_to_host": _link(each, 0.01, hidden, 0.02),
        "sums_to_device": _link(back, 0.005, 0.0, 0.02) if back else NOTHING,
        "weights_to_device": _link(2, 0.005, 0.0 if path is None else 0.004, 0.03),
        "to_host_in_step": NOTHING,
    }


def _timing(median: float) -> dict[str, Any]:
    return {"median": median, "iqr": median / 10, "raw": [median, median]}


def _pairs(name: str, **metrics: tuple[float, float]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "pairs": 5, "bit_identical": True, "floor_ratio": 1.2}
    for metric, (stock, ours) in metrics.items():
        found |= {
            f"{metric}_stock_seconds": _timing(stock),
            f"{metric}_ours_seconds": _timing(ours),
            f"{metric}_ratio": stock / ours,
        }
    return found


def _gradients(name: str) -> dict[str, Any]:
    own = _pairs(name, partition_grads=(0.02, 0.002), backward=(0.05, 0.03), step=(0.2, 0.15))
    return {**own, "rows": 8192, "stock_memory": "pinned", "floor_seconds": 0.01}


def _copy(kind: str, memory: str, gbps: float, call_share: float) -> dict[str, Any]:
    return {
        "bytes": 256 * MIB,
        "kind": kind,
        "memory": memory,
        "plain_gbps": gbps,
        "plain_best_gbps": gbps,
        "plain_device_gbps": gbps,
        "call_share": call_share,
        "our_gbps": gbps,
        "our_best_gbps": gbps,
        "ratio": 1.0,
    }


def _probe(way: str) -> dict[str, Any]:
    return {
        "way": way,
        "path": "pinned",
        "cast": "device",
        "carried": True,
        "gain": 2.0,
        "noise": 0.02,
        "elapsed_seconds": 7.0,
        "reasons": ["it is faster"],
        "warnings": [],
        "stability": ["steady"],
        "pin": {"seconds_per_gib": 0.4, "largest_bytes": GIB, "reason": None},
        "sync_seconds": {"device": 1e-5, "stream": 1e-5, "event": 1e-5},
    }


def _run(name: str, ours: int, peak: int) -> dict[str, Any]:
    standing = {"host_bytes": 0, "device_bytes": MIB}
    return {
        "name": name,
        "before": standing,
        "after": standing,
        "our_bytes": ours,
        "ours": {"fp32 gradients": ours},
        "counted_bytes": ours + ours // 2,
        "backward_peak_bytes": peak,
        "scratch_bytes": 0 if name == "DeepSpeed's own" else MIB,
    }


def _case(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "difference": None,
        "stock_failed": None,
        "steps": 200,
        "sleeps": 900,
        "seconds": 3.0,
        "overflows": 0,
    }


def good() -> dict[str, dict[str, Any]]:
    """By part, as a run on such a device would leave it."""
    pinned, direct = "pinned, cast on the device", "direct, cast on the host"
    return {
        "here": {
            "kind": "cuda",
            "training_kind": "cuda",
            "device": {"name": "A card", "count": 1, "memory_bytes": 80 * GIB, "driver": "1.2"},
            "software": {
                "autotune_offload": "0.1.0",
                "deepspeed": "0.19.8",
                "torch": "2.13.0",
                "python": "3.12.1",
            },
            "host": {
                "cpu_model": "A CPU",
                "affinity_cpus": 16,
                "cpu_count": 16,
                "ram_bytes": 128 * GIB,
                "numa_nodes": 1,
                "numa_bound": False,
            },
            "limits": {"pinnable_bytes": 100 * GIB},
            "ceiling": {"gbps": 63.0, "name": "PCIe 5 x16", "source": "NVML"},
            "why_not_pinned": None,
            "load": 0.2,
            "doctor": "```text\nall is well\n```",
        },
        "build": {"cpu_adam": None, "pass_why_not": None, "seconds": 1.0},
        "probes": {
            "probes": [_probe("a"), _probe("a")],
            "quick": [_probe("a"), _probe("b")],
            "flips": {"other": 1, "of": 2, "ways": {"a": 1, "b": 1}},
        },
        "copies": {
            "copies": [
                _copy("d2h", "pinned", 55.0, 0.01),
                _copy("h2d", "pinned", 55.0, 0.01),
                _copy("d2h", "pageable", 10.0, 0.98),
                _copy("h2d", "pageable", 12.0, 0.9),
            ]
        },
        "sweep": {
            "limit": 1.05,
            "median_ratio": 1.0,
            "ratios": [1.0, 1.01],
            "flipped": [{"way": "a", "ratio": 1.0}, {"way": "b", "ratio": 1.04}],
            "repeats": [
                {
                    "chosen": "a",
                    "chosen_seconds": 0.1,
                    "best": "a",
                    "best_seconds": 0.1,
                    "ratio": 1.0,
                    "sweep_seconds": {"a": 0.1, "b": 0.104},
                }
            ],
        },
        "training": {
            "gradients": [_gradients("the choice"), _gradients(pinned), _gradients(direct)],
            "steps": [
                {
                    **_pairs("step, optimizer only", step_phase=(0.1, 0.05), train_step=(0.3, 0.2)),
                    "threads": 16,
                }
            ],
            "failed": [],
        },
        "profiled": {
            "ways": [
                _way("DeepSpeed's own, pinned", None, None, 0.002),
                _way(pinned, "pinned", "device", 0.009),
                _way(direct, "direct", "host", 0.004),
            ],
            "failed": [],
        },
        "identity": {
            "steps": 200,
            "control": None,
            "sleeps": "everywhere",
            "cases": [_case("bf16"), _case("step: bf16")],
        },
        "memory": {
            "counted_by": "torch.cuda.host_memory_stats",
            "runs": [_run("DeepSpeed's own", GIB, GIB), _run("staged", GIB + MIB, GIB)],
            "failed": [],
        },
        "described": {
            "file": "machine.yaml",
            "numbers": 28,
            "trials": [{"way": "a", "measured_seconds": 0.1, "predicted_seconds": 0.11}],
            "training": [
                {"name": pinned, "predicted_saved_seconds": 0.01, "measured_saved_seconds": 0.012},
            ],
        },
    }
