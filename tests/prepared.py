"""Runs training scripts in children of one process that has imported DeepSpeed and the frameworks already.

The imports take longer than the trainings, and each run needs a process of its own: DeepSpeed and the
frameworks keep state for its whole life. So the parent imports, and forks for every rank of every run.

    python -m tests.prepared

reads one JSON object a line: ``{"script": ..., "arguments": [...], "ranks": 1, "environment": {...},
"choice": bool, "out": folder}``, and answers with a line of exit codes. Rank r writes ``out/r.log`` and
``out/r.json``: one object for each engine, with what it was given. ``"choice": true`` puts `CHOICE` in place of
measuring, with values that no default has.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from autotune_offload.records import ZeroSizes
from tests.factories import make_choice, make_profile
from tests.ports import free_port

CHOICE = make_choice(
    path="direct",
    cast="host",
    pin_optimizer=False,
    pin_parameters=False,
    sizes=ZeroSizes(
        reduce_bucket_elements=2_000_003,
        prefetch_bucket_elements=1_000_003,
        persistence_threshold_elements=99,
        sub_group_elements=3_000_003,
    ),
)
TIMEOUT_SECONDS = 600
"""Enough for the first run on a machine, which compiles an operation of DeepSpeed's."""


def load() -> None:
    """What every child would spend its time on."""
    import deepspeed  # noqa: F401
    from accelerate import Accelerator  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer  # noqa: F401


def watch_engines(seen: list[dict[str, Any]]) -> None:
    """Note what each engine and each `zero.Init` was given, through DeepSpeed's own classes."""
    import deepspeed

    construct, enter = deepspeed.DeepSpeedEngine.__init__, deepspeed.zero.Init.__enter__
    names = ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold", "sub_group_size")

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        zero = self._config.zero_config
        seen.append(
            {name: getattr(zero, name) for name in names}
            | {
                "kind": "engine",
                "pin_optimizer": zero.offload_optimizer.pin_memory,
                "pin_parameters": zero.offload_param.pin_memory if zero.offload_param else None,
                "steps_per_print": str(self.config.get("steps_per_print")),
                "config": type(self.config).__name__,
            }
        )

    def entered(self: Any) -> Any:
        seen.append({"kind": "zero.Init", "pin_parameters": self.pin_memory})
        return enter(self)

    deepspeed.DeepSpeedEngine.__init__ = constructed
    deepspeed.zero.Init.__enter__ = entered


def use_choice() -> None:
    """Every decision of this process is `CHOICE`."""
    from autotune_offload.api import profile

    vars(profile)["lookup"] = lambda *args, **kwargs: make_profile(choice=CHOICE)


def run_rank(job: dict[str, Any], rank: int, port: int) -> int:
    """The script as its own main module; the exit code that its process would have had."""
    out = Path(job["out"])
    log = os.open(out / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    ranks = job.get("ranks", 1)
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | job.get("environment", {})
    )
    seen: list[dict[str, Any]] = []
    watch_engines(seen)
    if job.get("choice"):
        use_choice()
    sys.argv = [job["script"], *job.get("arguments", [])]
    sys.path[0] = str(Path(job["script"]).parent)
    os.chdir(sys.path[0])
    code = 0
    try:
        runpy.run_path(job["script"], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    (out / f"{rank}.json").write_text(json.dumps(seen))
    return code


def run(job: dict[str, Any]) -> list[int]:
    """All ranks of one job at once; -9 for those that did not end in time."""
    port = free_port()
    children = []
    for rank in range(job.get("ranks", 1)):
        child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT_SECONDS)
            code = run_rank(job, rank, port)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # without the exit handlers of what the parent imported
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Serve jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports and children say is not an answer
    load()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
