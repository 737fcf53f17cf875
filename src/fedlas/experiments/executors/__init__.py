"""Executors train runs in this process, in local worker processes, or as Ray tasks; `scheduler.py` feeds them."""
