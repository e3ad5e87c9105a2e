"""Tests of `autotune_offload.doctor`."""
