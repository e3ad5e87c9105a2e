"""Tests of `autotune_offload.decide`."""
