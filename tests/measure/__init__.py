"""Tests of `autotune_offload.measure`."""
