"""A sharded center: several processes hold a slice of it each."""
