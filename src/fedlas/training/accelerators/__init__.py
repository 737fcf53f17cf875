"""Triton custom kernels for training on a GPU, and what is built of them.

`norms` comes first, `stem` and `products` use it, and `fused` makes residual networks of all three; `blocks` is the
ground of `descent`, the end of a step. Needs Triton, so nobody imports it but who has made sure of that.
"""
