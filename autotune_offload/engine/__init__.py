"""The live optimizer: what is read of it, a path put into it and taken out, and real training to verify it.

From below: stage3, norms, overflow, delivery, passes, tally, self_check, visible, clock, rounds, confirmation,
entrants, contest, status, replacement, one_flag, attachment, attach, step_adam, step_check, step_stage3,
step_contest, step, step_attach, toy_model, trainee, verify.
"""
