"""`python -m autotune_offload`: the same as the `autotune-offload` command."""

from __future__ import annotations

from autotune_offload.cli import main

if __name__ == "__main__":
    main()
