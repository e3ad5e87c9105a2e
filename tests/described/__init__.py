"""Tests of `autotune_offload.described`."""
