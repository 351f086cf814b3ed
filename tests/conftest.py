"""Settings for every test, made before any of them imports torch."""

import os
import sys

# Else OpenMP's threads spin while they wait, and two programs on the same cores slow each other down far
# more than twofold. It costs a program that is alone about a tenth; results do not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import programs

programs.forget_buckets()  # whatever this machine is set up for, fixtures of every scope included

# Where Python is told to keep no bytecode, every program that a test starts would compile torch and all the
# rest anew, which takes longer than most tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
