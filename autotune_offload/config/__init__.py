"""A ds_config in, a ds_config out: pure functions of its text.

From below: sections, layout, block, texts, foreign, batches, reading, keys, mistakes, lost_gradients,
tune, nvme, equal_keys.
"""
