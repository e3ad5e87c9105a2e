"""Tests of `autotune_offload.ranks`."""
