"""Tests of `autotune_offload.config`."""
