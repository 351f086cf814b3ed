"""How the chapter's results were measured: python -m studies.drills. Can be deleted."""
