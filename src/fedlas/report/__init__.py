"""What people look at: figures of what was measured."""
