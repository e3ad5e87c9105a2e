"""What a person reads: every alternative, the explanation, pictures, one page.

From below: alternatives, timeline, trace, explanation, steps, drawing, bandwidth, costs, stages, page.
"""
