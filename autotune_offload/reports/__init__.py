"""What a person reads: every alternative, the explanation, pictures, one page.

From below: alternatives, timeline, explanation, steps, trace, drawing, bandwidth, costs, stages, page.
"""
