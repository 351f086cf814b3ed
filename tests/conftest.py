"""Settings for every test, made before any of them imports torch."""

import os

# Else OpenMP's threads spin while they wait, and two programs on the same cores slow each other down far
# more than twofold. It costs a program that is alone about a tenth; results do not change.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
