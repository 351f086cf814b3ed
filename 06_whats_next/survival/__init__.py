"""What a run does against its end: whole checkpoints, agreed stops, and a way back."""
