"""How a commit crosses a network."""
