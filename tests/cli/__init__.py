"""Tests of `autotune_offload.cli`."""
