"""Measurements that the README's claims rest on; each module is a script with its own output contract."""
