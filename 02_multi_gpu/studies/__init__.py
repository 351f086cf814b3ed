"""Studies of training on several devices. scaling.py runs them; train.py needs none of them."""
