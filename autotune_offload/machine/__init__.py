"""What is here: this host, its limits and its bus, and the device that DeepSpeed drives.

From below: procfs, host, limits, bus, host_pass, device, identity, accelerator.
"""
