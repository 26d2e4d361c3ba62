"""Settings as text: objects from names and fields, run.toml, keyword arguments, optional libraries."""
