"""What a run will cost: python -m plan RUN. Can be deleted."""
