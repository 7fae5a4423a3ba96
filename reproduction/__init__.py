"""The paper's figures: what is trained for them, the claims, the drawings."""
