"""The laws that every scheme and every engine must obey, and the problems they are tried on."""
