"""Tests of `autotune_offload.reports`."""
