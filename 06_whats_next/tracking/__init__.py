"""What a run writes down: its record, the times of each rank, and its diary."""
