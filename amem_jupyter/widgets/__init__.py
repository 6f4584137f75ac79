"""Live widgets: each one Python, one JavaScript and one CSS file, loaded from the package and from nowhere else."""
