"""What a run of the tests leaves in shared memory is removed, and nothing else."""

from __future__ import annotations

import mmap
from pathlib import Path

from tests.shared_memory import buffers, remove_since


def test_only_what_came_since_and_is_in_no_use_is_removed(tmp_path: Path) -> None:
    """Somebody else's stays, so does one that a process has mapped, and every other file."""
    earlier, later, used = (tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_{n}_0" for n in range(3))
    other = tmp_path / "sem.something"
    for path in (earlier, other):
        path.write_bytes(b"x")
    before = buffers(tmp_path)
    for path in (later, used):
        path.write_bytes(b"x")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 1):
        remove_since(before, tmp_path)
    assert set(tmp_path.iterdir()) == {earlier, other, used}
    remove_since(before, tmp_path)
    assert set(tmp_path.iterdir()) == {earlier, other}
