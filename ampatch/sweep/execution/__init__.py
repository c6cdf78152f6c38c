"""Running a sweep: its directory, and one process for each trial."""
