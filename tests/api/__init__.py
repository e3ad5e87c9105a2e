"""Tests of `autotune_offload.api`."""
