"""Experiments: what is trained, measured and shown together, one file each."""
