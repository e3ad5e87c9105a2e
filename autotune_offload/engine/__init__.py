"""The live optimizer: what is read of it, a path put into it and taken out, and real training to verify it.

From below: stage3, self_check, attachment, attach, toy_model, trainee, verify.
"""
