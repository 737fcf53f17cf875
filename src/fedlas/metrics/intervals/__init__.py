"""Confidence intervals of metrics.

`methods.py` has the methods that metrics declare as their `interval`; `resampling.py` and `classwise.py` the bootstrap,
`inversion.py` the test inversion for sums of absolute gaps, `binomial.py` intervals of a proportion.
"""
