"""The time and memory of DDP on N GPUs, on paper. predict_scaling.py prints it."""
