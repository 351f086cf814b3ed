"""From NetCDF files to references in Icechunk. make_references.py runs it; train.py needs none of it."""
