"""Tests of `autotune_offload.machine`."""
