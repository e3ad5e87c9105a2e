"""Real trainings through DeepSpeed itself, transformers, accelerate and Lightning: tuned, and the same to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import CHECKOUT
from tests.ports import free_port
from tests.prepared import CHOICE

EXAMPLES = CHECKOUT / "examples"
SCRIPTS = CHECKOUT / "tests" / "scripts"

_missing = [name for name in ("transformers", "accelerate", "lightning") if not find_spec(name)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing), reason=f'{", ".join(_missing)}: install the extra "frameworks"'),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished job: the exit code, log and observations of each rank."""

    codes: list[int]
    logs: list[str]
    seen: list[list[dict[str, Any]]]

    @property
    def losses(self) -> list[list[tuple[int, str]]]:
        """Step and loss with all its digits, for each rank."""
        return [losses(log) for log in self.logs]

    def of(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """What the engines or the `zero.Init` contexts of one rank were given."""
        return [each for each in self.seen[rank] if each["kind"] == kind]


Start = Callable[..., Run]


def losses(output: str) -> list[tuple[int, str]]:
    """Step and loss with all its digits, as the scripts print them."""
    return [(int(step), loss) for step, loss in re.findall(r"step +(\d+) +loss ([\d.]+)", output)]


RUN = (sys.executable, "-m", "autotune_offload", "run", "--")


def run_unchanged(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command below `autotune-offload run`, which must end well and say what was chosen."""
    kept = {name: value for name, value in os.environ.items() if name not in {*ONE_RANK, "AUTOTUNE_OFFLOAD"}}
    done = subprocess.run(
        [*RUN, *command],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Runs a script in a process that has everything imported; the same job twice is run once."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("AUTOTUNE_OFFLOAD", None)
    errors = tmp_path_factory.mktemp("prepared") / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.prepared"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=CHECKOUT,
            env=environment,
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        done: dict[str, Run] = {}

        def run(script: Path, *arguments: str, **job: Any) -> Run:
            job = {"script": str(script), "arguments": arguments, "choice": True, "ranks": 1, **job}
            key = json.dumps(job)
            if key not in done:
                assert server.stdin is not None and server.stdout is not None
                out = tmp_path_factory.mktemp("run")
                server.stdin.write(json.dumps({**job, "out": str(out)}) + "\n")
                server.stdin.flush()
                answer = server.stdout.readline()
                assert answer, errors.read_text()[-4000:]
                logs = [(out / f"{rank}.log").read_text() for rank in range(job["ranks"])]
                seen = [out / f"{rank}.json" for rank in range(job["ranks"])]
                codes = json.loads(answer)
                done[key] = Run(
                    codes=codes,
                    logs=logs,
                    seen=[json.loads(file.read_text()) if file.exists() else [] for file in seen],
                )
                assert not any(codes), "\n".join(log[-3000:] for log in logs)
            return done[key]

        yield run
        server.stdin.close()


def stock(start: Start, script: Path, *arguments: str, **job: Any) -> Run:
    """The same script with everything switched off."""
    off = {**job.pop("environment", {}), "AUTOTUNE_OFFLOAD": "0"}
    return start(script, *arguments, choice=False, environment=off, **job)


def is_tuned(engine: dict[str, Any]) -> bool:
    """Whether an engine has the values of `CHOICE`, which no default has."""
    sizes = (
        engine["reduce_bucket_size"],
        engine["prefetch_bucket_size"],
        engine["param_persistence_threshold"],
    )
    return (
        sizes == (2_000_003, 1_000_003, 99)
        and engine["pin_optimizer"] is engine["pin_parameters"] is False
        and engine["sub_group_size"]
        != CHOICE.sizes.sub_group_elements  # only written with the pin that needs it
    )


# -- the examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["raw", "zero_init", "hf_trainer", "lightning_fit"])
def test_an_example_trains_tuned_and_no_loss_differs_by_a_bit(start: Start, name: str) -> None:
    """The engine has the chosen values, the losses are those of the stock run, and they fall."""
    tuned, plain = start(EXAMPLES / f"{name}.py"), stock(start, EXAMPLES / f"{name}.py")
    (engine,) = tuned.of("engine")
    assert is_tuned(engine) and engine["config"] == "dict"
    assert not is_tuned(plain.of("engine")[0])
    assert len(tuned.losses[0]) == 10
    assert tuned.losses == plain.losses
    assert float(tuned.losses[0][-1][1]) < float(tuned.losses[0][0][1])


def test_the_readme_shows_the_lines_of_the_examples() -> None:
    """Each one-liner of the table stands in an example just so."""
    readme = (CHECKOUT / "README.md").read_text()
    table = readme[readme.index("| you call") :].split("\n\n")[0].splitlines()[2:]
    lines = [re.split(r"(?<!\\)\|", row)[2].strip().strip("`") for row in table]
    examples = "\n".join(path.read_text() for path in sorted(EXAMPLES.rglob("*.py")))
    assert len(lines) >= 5
    for line in lines:
        assert line in examples, line


# -- pinned before initialize ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zero_init", "hf_trainer"])
def test_zero_init_gets_the_same_pin_as_initialize(start: Start, name: str) -> None:
    """Parameters that are partitioned while the model is built are laid out as was chosen."""
    tuned, plain = start(EXAMPLES / f"{name}.py"), stock(start, EXAMPLES / f"{name}.py")
    assert {each["pin_parameters"] for each in tuned.of("zero.Init")} == {False}
    assert {each["pin_parameters"] for each in plain.of("zero.Init")} == {True}


# -- the Trainer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["tune_config", "install"])
def test_the_trainers_own_auto_gives_way_and_the_rest_stays(start: Start, way: str) -> None:
    """Sizes that were "auto" are ours though the Trainer made them numbers first; `inf` passes through."""
    tuned, plain = start(SCRIPTS / "hf_arguments.py", way), stock(start, SCRIPTS / "hf_arguments.py", "stock")
    engine = tuned.of("engine")[0]
    assert is_tuned(engine)
    assert engine["steps_per_print"] == "inf"
    assert plain.of("engine")[0]["reduce_bucket_size"] == 64 * 64
    assert tuned.losses == plain.losses and len(tuned.losses[0]) == 4


def test_a_second_train_ends_as_it_does_without_us(start: Start) -> None:
    """Transformers with this DeepSpeed cannot train twice; tuning neither mends nor changes that."""
    tuned = start(SCRIPTS / "hf_arguments.py", "install")
    plain = stock(start, SCRIPTS / "hf_arguments.py", "stock")
    said = [re.findall("second train: .*", run.logs[0]) for run in (tuned, plain)]
    assert said[0] == said[1] and len(said[0]) == 1


# -- stand-alone scripts, unchanged ---------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lora_frozen_base", ["--steps", "3"]),
        ("checkpointing_accumulation", ["--deepspeed_config", "ds_accumulation.json"]),
        ("from_pretrained", []),
    ],
)
def test_a_stand_alone_script_is_tuned_unchanged(start: Start, name: str, arguments: list[str]) -> None:
    """What was chosen is on stderr, and no loss differs by a bit from those of the plain run."""
    plain = stock(start, SCRIPTS / f"{name}.py", *arguments)
    command = [f"{name}.py", *arguments]
    ours = run_unchanged(*command, cwd=SCRIPTS, **ONE_RANK, MASTER_PORT=str(free_port()))
    assert "autotune-offload: path " in ours.stderr
    assert re.search(r"zero_optimization\.offload_optimizer\.pin_memory: (absent|true) -> false", ours.stderr)
    assert losses(ours.stdout) == plain.losses[0] != []


@pytest.mark.long
def test_two_ranks_under_a_launcher_train_as_without_us(start: Start) -> None:
    """Each rank's process is tuned below the launcher; they end, with the losses of an untuned run."""
    plain = stock(start, SCRIPTS / "lora_frozen_base.py", "--steps", "3", ranks=2)
    launcher = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())]
    ours = run_unchanged(*launcher, "lora_frozen_base.py", "--steps", "3", cwd=SCRIPTS)
    by_rank = [re.findall(rf"rank {rank} (step +\d+ +loss [\d.]+)", ours.stdout) for rank in (0, 1)]
    assert [losses("\n".join(lines)) for lines in by_rank] == plain.losses
    assert len(plain.losses[0]) == 3


@pytest.mark.long
def test_accelerate_launch_is_tuned_from_the_outside(start: Start) -> None:
    """The example's command, as its script says it; the configuration comes from the launcher's file."""
    script = EXAMPLES / "accelerate_launch" / "train.py"
    (line,) = re.findall(r"^ +autotune-offload run -- (.+)$", script.read_text(), re.MULTILINE)
    ours = run_unchanged(*line.split(), cwd=script.parent)
    assert "autotune-offload: path " in ours.stderr
    plain = losses(run_unchanged(*line.split(), cwd=script.parent, AUTOTUNE_OFFLOAD="0").stdout)
    assert losses(ours.stdout) == plain
    assert len(plain) == 10 and float(plain[-1][1]) < float(plain[0][1])


# -- two ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (EXAMPLES / "raw.py", ()),
        (SCRIPTS / "hf_arguments.py", ("install",)),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_two_ranks_train_as_without_us(start: Start, script: Path, arguments: tuple[str, ...]) -> None:
    """Nothing hangs, both ranks have the same sizes, and every loss is that of the stock run."""
    tuned = start(script, *arguments, ranks=2, choice=False)
    plain = stock(start, script, *(["stock"] if arguments else []), ranks=2)
    assert tuned.losses == plain.losses and tuned.losses[0]
    first, second = (tuned.of("engine", rank)[0] for rank in (0, 1))
    assert first == second
