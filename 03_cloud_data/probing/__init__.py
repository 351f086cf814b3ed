"""What a store gives from here, and what other chunks would give. probe.py prints it."""
