"""Messages between processes of different machines: the wire, addresses, connections. Knows no center."""
