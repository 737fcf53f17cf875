"""Confidence intervals of metrics.

`methods.py` has the methods that metrics name as their `interval`, `inversion.py` and `classwise.py` the intervals of
sums of absolute gaps, `resampling.py` the draws, `binomial.py` intervals of a share.
"""
