"""One model as steps on a flat vector."""
