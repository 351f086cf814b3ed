"""What would stop or slow a run, found before it starts: python -m preflight. Can be deleted."""
