"""A center spread over several processes."""
