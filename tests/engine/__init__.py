"""Tests of `autotune_offload.engine`."""
