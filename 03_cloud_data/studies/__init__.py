"""Studies of how batches are read. benchmark.py runs them; train.py needs none of them."""
