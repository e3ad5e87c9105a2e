"""The ways between device and host. What is timed is what runs: trials and training run these objects.

From below: threads, path, destination, ring, accumulation, build, stock, device_memory, pinned_blocks, page_locking,
host_state, rates, stages, step_stages, pieces.
"""
