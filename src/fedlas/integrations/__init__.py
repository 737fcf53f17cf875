"""Adapters for other frameworks, one file each; no other module of fedlas imports them."""
