"""Messages between processes on different machines: wire format, addresses, connections. Does not depend on the center."""
