"""Ways in which training on two devices is quietly not training on one. Nothing imports it but wrong_ways.py."""
