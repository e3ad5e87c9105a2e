"""What is here: this host, its limits and its bus, and the device that DeepSpeed drives.

From below: procfs, cgroups, allocator, limits, host, bus, host_pass, device, identity, accelerator.
"""
