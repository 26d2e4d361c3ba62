"""Laws that every scheme and every engine must obey, and the problems on which they are tested."""
