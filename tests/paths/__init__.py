"""Tests of `autotune_offload.paths`."""
