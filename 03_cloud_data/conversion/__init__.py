"""From scattered files to a store. make_store.py runs it; train.py needs none of it."""
