"""From what a user gives, or a run.toml names, to a job that any engine can run."""
