"""The live optimizer: what is read of it, a path put into it and taken out, and real training to verify it.

From below: stage3, norms, delivery, passes, self_check, replacement, attachment, attach, toy_model, trainee, verify.
"""
