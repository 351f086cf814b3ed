"""Fill whole maps with a trained network: python -m predict CKPT. Can be deleted."""
