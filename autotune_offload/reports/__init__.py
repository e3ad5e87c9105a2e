"""What a person reads: every alternative, the explanation, pictures, one page.

From below: alternatives, timeline, trace, explanation, drawing, bandwidth, costs, stages, page.
"""
