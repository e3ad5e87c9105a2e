"""Tests of `autotune_offload.profiles`."""
