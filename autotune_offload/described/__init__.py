"""Machines on paper: read from a file or made from a profile, and a device that plays one on a virtual clock.

From below: machine, from_profile, host_side, speeds, blocks, virtual_time, traffic, clocked, simulated.
"""
