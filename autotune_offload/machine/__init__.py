"""What is here: this host, its limits and its bus, and the device that DeepSpeed drives.

From below: procfs, cgroups, allocator, limits, host, bus, variants, compiled, host_pass, adam, spans, device, ranges,
identity, accelerator.
"""
